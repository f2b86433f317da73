"""``fedtar renew``: which certificates it takes, and that nothing else of a kit changes."""

from datetime import UTC, datetime, timedelta
from zipfile import ZipFile

import pytest
from command import failing, passing
from kits import make_kit
from nvflare.lighter import utils as flare
from tables import cases

from fedtar_flare.core.files import hashes
from fedtar_flare.provision.renewal import renew

NOW = datetime.now(UTC)
SITE = flare.Identity("hospital-a", "hub")


@pytest.fixture(scope="module")
def keys():
    return [flare.generate_keys()[0] for _ in range(4)]


@pytest.fixture
def signed(keys):
    """Makes certificates of the root, the first key; the second is that of the kit."""

    def sign(who=SITE, key=2, root=0, days=30, begins=-1, **more):
        dates = {"not_valid_before": NOW + timedelta(begins), "not_valid_after": NOW + timedelta(days)}
        issuer, public = flare.Identity("project"), keys[key].public_key()
        return flare.serialize_cert(flare.generate_cert(who, issuer, keys[root], public, **dates, **more))

    return sign


@pytest.fixture
def place(tmp_path, keys, signed):
    """Makes a kit with a certificate and key; a server's has the server's names."""

    def make(folder, certificate, key, role="client"):
        startup = make_kit(tmp_path / folder) / "startup"
        (startup / f"{role}.crt").write_bytes(certificate)
        (startup / f"{role}.key").write_bytes(flare.serialize_pri_key(keys[key]))
        (startup / "rootCA.pem").write_bytes(signed(flare.Identity("project"), key=0, days=1000, ca=True))
        return startup.parent

    return make


def whole(kit):
    return {folder: hashes(kit / folder) for folder in ("startup", "local")}


@pytest.mark.parametrize(("change", "reason"), cases(__file__, "renewal.yaml"))
def test_a_certificate_that_is_not_the_kit_s_own_is_refused_with_the_reason(place, signed, change, reason):
    change |= {"who": flare.Identity(*change["who"])} if "who" in change else {}
    kit, new = place("kit", signed(key=1, days=9), 1), place("new", signed(**change), 2)
    before = whole(kit)
    assert reason in failing("renew", new, "--kit", kit)
    assert whole(kit) == before


@pytest.mark.parametrize("role", ["client", "server"])
def test_nothing_changes_but_certificate_and_key_and_a_cut_renewal_is_completed(place, signed, role, keys):
    kit, new = place("kit", signed(key=1, days=9), 1, role), place("new", signed(), 2, role)
    before = whole(kit)
    (kit / "startup" / f"{role}.key").write_bytes(flare.serialize_pri_key(keys[2]))  # a first try ended in between
    assert f"valid until {NOW + timedelta(30):%Y-%m-%d}" in passing("renew", new, "--kit", kit)
    after = whole(kit)
    names = {f"{role}.crt", f"{role}.key"}
    assert after["local"] == before["local"]
    assert {name for name in after["startup"] if after["startup"][name] != before["startup"][name]} == names
    assert all(after["startup"][name] == hashes(new / "startup")[name] for name in names)
    assert all((kit / "startup" / name).stat().st_mode & 0o077 == 0 for name in names)
    assert "no later than the one" in failing("renew", new, "--kit", kit), "it has been renewed already"


def test_what_is_no_certificate_is_refused(place, signed, tmp_path):
    kit, new = place("kit", signed(key=1, days=9), 1), place("new", signed(), 2)
    key, archive = new / "startup" / "client.key", tmp_path / "signed.zip"
    for members in ({}, {"a.crt": b"x", "b.crt": b"x"}, {"a.crt": b"no certificate"}):
        with ZipFile(archive, "w") as file:
            for name, content in members.items():
                file.writestr(name, content)
        assert "cannot be put into" in failing("renew", archive, "--kit", kit, "--key", key)
    whole = archive.read_bytes()
    entry = whole.rfind(b"PK\1\2")
    for place, bit in ((entry + 8, 1), (entry + 10, 64)):  # it needs a password; another way of packing
        archive.write_bytes(whole[:place] + bytes([whole[place] | bit]) + whole[place + 1 :])
        assert "cannot be put into" in failing("renew", archive, "--kit", kit, "--key", key)
    assert "by --key" in failing("renew", archive, "--kit", kit)
    with ZipFile(archive, "w") as file:
        file.writestr("hospital-a.crt", signed())
        file.writestr("rootCA.pem", b"another")
    assert renew(kit, archive, key) > NOW + timedelta(29)
    assert "cannot be put into" in failing("renew", tmp_path / "none", "--kit", kit, "--key", key)
    assert "cannot be put into" in failing("renew", new, "--kit", tmp_path)
