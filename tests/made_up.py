"""A method that does not exist: every form of group and every kind of field, for tests of what reads a contract."""

from fedtar_flare.protocol.contract import ADAPTER, PARAMETERS, PRIVACY, SECONDS, Contract, Field, Group, Task
from fedtar_flare.registry import Method

ROWS = Group("rows", "collected", ("bank.features",), "one row a patient", personal=True, max_rows=4, width=3)
MODULES = Group("modules", "pooled", ("module.[a-z]*",), "what a site learnt")

CONTRACT = Contract(
    method="madeup",
    title="A method of the tests",
    groups=(PARAMETERS, ADAPTER, ROWS, MODULES),
    tasks=(
        Task(
            "hello",
            "agree",
            at="start",
            up=(ADAPTER.name, PARAMETERS.name),
            sends="initial",
            fields=(Field("schema", "schema", "what travels", public=True), PRIVACY, SECONDS),
        ),
        Task(
            "learn",
            "everything that can travel travels",
            down=(ADAPTER.name, ROWS.name, MODULES.name),
            up=(PARAMETERS.name, ADAPTER.name, ROWS.name, MODULES.name),
            sends="difference",
            follows=("hello", "learn"),
            fields=(
                Field("n", "count", "visits", least=1, most=100, public=True, required=True),
                Field("loss", "number", "a loss", noisy=True),
                Field("slopes", "numbers", "a vector", length=3, noisy=True),
                Field("grades", "tree", "numbers by name", length=200),
                Field("mode", "word", "a word", public=True),
                Field("parts", "words", "words by name", length=2, public=True),
                Field("options", "settings", "of the job", length=200, public=True),
                PRIVACY,
                SECONDS,
            ),
        ),
        Task("rest", "nothing travels", fields=(PRIVACY, SECONDS)),
    ),
    stays="everything else",
)

METHOD = Method(CONTRACT, server=object, site=object)
