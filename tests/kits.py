"""A hospital's startup kit, and a table of radiographs, as far as a site looks at them."""

from types import SimpleNamespace

import numpy as np
import yaml
from nvflare.lighter.provision import prepare_builders, prepare_project
from nvflare.lighter.provisioner import Provisioner
from PIL import Image


def make_kit(folder, site_file="source: synthetic\n"):
    for part in ("startup", "local"):
        (folder / part).mkdir(parents=True)
    (folder / "startup" / "fed_client.json").write_text("{}")
    (folder / "local" / "fedtar.yaml").write_text(whole(site_file))
    return folder


def provisioned(repository, folder, sites=None, more=()):
    """FLARE's kits of the trial project, with gates and, if given, other sites and ``more`` participants."""
    content = yaml.safe_load((repository / "provisioning" / "project-localhost.yml").read_text()) | {"release": {}}
    if sites:
        others = [entry for entry in content["participants"] if entry["type"] != "client"]
        content["participants"] = [*others, *({"name": name, "type": "client", "org": "hub"} for name in sites)]
    content["participants"] = [*content["participants"], *more]
    (folder / "project.yml").write_text(yaml.safe_dump(content))
    kits = make_kits(content, folder)
    return SimpleNamespace(project=folder / "project.yml", of=kits, root=kits / "localhost" / "startup" / "rootCA.pem")


def make_kits(content, folder):
    """The first kits of a project in a folder, made in this process as ``nvflare provision`` makes them."""
    folder.mkdir(parents=True, exist_ok=True)
    provisioner = Provisioner(str(folder), prepare_builders(content))
    assert not provisioner.provision(prepare_project(content)).get("build_error")
    return next(folder.glob("*/prod_00"))


def whole(site_file):
    """A site file as that of a site with patients must be: with a policy, and its end."""
    return site_file + ("" if "policy:" in site_file else "policy: {}\n") + "...\n"


def add_to_site_file(kit, line):
    """Put a line into a kit's site file, in place of the one with the same key."""
    file = kit / "local" / "fedtar.yaml"
    others = [one for one in file.read_text().splitlines() if not one.startswith(("...", line.split(":")[0] + ":"))]
    file.write_text(whole("\n".join([*others, line, ""])))


def write_radiographs(folder, number, visits=1, name="P"):
    """``manifest.csv`` of so many radiographs, one a day, with as many visits of each patient P0, P1 and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["patient_id,study_datetime,image,report"]
    for i in range(number):
        write_noise(folder / f"{i}.png", i)
        rows.append(f"{name}{i // visits},2020-{1 + i // 28:02d}-{1 + i % 28:02d},{i}.png,No finding.")
    (folder / "manifest.csv").write_text("\n".join(rows))
    return folder / "manifest.csv"


def write_noise(path, seed):
    """A picture unlike that of any other seed: patients who share a picture share a split."""
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 64), np.uint8)).save(path)
    return path
