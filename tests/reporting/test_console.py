import pytest
from recorded_runs import write_run

from fedtar_flare.record.events import End, Evaluation, SiteScores, SiteValidation, Start, Validation
from fedtar_flare.record.log import RunRecord
from fedtar_flare.reporting.console import final_table
from fedtar_flare.reporting.run import read_run


def cell(n, bleu_4, cider, token_loss, finding_f1):
    return {"n": n, "bleu_4": bleu_4, "cider": cider, "token_loss": token_loss, "finding_f1": finding_f1}


def of(first, second, whole):
    return SiteScores(steps={1: first, 2: second}, all=whole)


def write_small_run(folder, final=True, end="completed", generic=False):
    record = RunRecord(folder)
    record.write(Start(method="other", run_id="r", sites=["a", "north"], min_cell=5, time_steps=2, rounds=1))
    first = {
        "a": of(cell(6, 0.08, 0.4, 2.4, None), {"n": 3}, cell(6, 0.09, 0.5, 2.5, 0.2)),
        "north": of(cell(6, 0.1, 0.5, 2.25, 0.3), {"n": 0}, cell(6, 0.1, 0.5, 2.25, 0.3)),
    }
    last = {
        "a": of(cell(6, 0.5, 4.0, 0.5, 0.8), {"n": 3}, cell(6, 0.45, 10.0, 0.625, 0.75)),
        "north": of(cell(6, 1.0, 9.5, 0.125, 1.0), {"n": 0}, cell(6, 1.0, 9.5, 0.125, 1.0)),
    }
    record.write(Evaluation(round=0, sites=first))
    if final:
        record.write(Validation(round=1, loss=0.5, sites={"a": SiteValidation(validation_loss=0.5, n=9)}))
        record.write(Evaluation(round=1, sites=last, generic=first if generic else {}))
    if end:
        record.write(End(seconds=75.2, status=end, reason="" if end == "completed" else "the job was\naborted"))
    return read_run(folder)


TABLE = """\
Scores of test reports, warm start -> round 1 in 1 min 15 s. All but token loss are x 100.
site            step     n          BLEU-4            CIDEr       token loss      finding F1
a                  1     6    8.0 ->  50.0   40.0 ->  400.0   2.400 -> 0.500      - ->  80.0
a                  2   < 5
a                all     6    9.0 ->  45.0   50.0 -> 1000.0   2.500 -> 0.625   20.0 ->  75.0
north              1     6   10.0 -> 100.0   50.0 ->  950.0   2.250 -> 0.125   30.0 -> 100.0
north              2     0
north            all     6   10.0 -> 100.0   50.0 ->  950.0   2.250 -> 0.125   30.0 -> 100.0
mean of sites    all    12    9.5 ->  72.5   50.0 ->  975.0   2.375 -> 0.375   25.0 ->  87.5"""


def test_the_table_exactly(tmp_path):
    assert final_table(write_small_run(tmp_path)) == TABLE


def test_scores_of_the_shared_adapter_alone_follow(tmp_path):
    table, _, off = final_table(write_small_run(tmp_path, generic=True)).partition("\nThe shared adapter alone:\n")
    assert table == TABLE
    assert " ".join(off.splitlines()[1].split()) == "a 1 6 - -> 8.0 - -> 40.0 - -> 2.400 - -> -"


def test_all_scores_and_the_lines_of_the_method_s_own_sections_are_printed(tmp_path):
    table = final_table(read_run(write_run(tmp_path)))
    heads = [line for line in table.splitlines() if line.startswith("site ")]
    assert [head.split()[3:] for head in heads] == [
        ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4"],
        ["ROUGE-L", "CIDEr", "token", "loss", "finding", "F1"],
        ["known", "findings", "F1", "new", "findings", "F1", "new", "findings", "recall"],
    ]
    assert table.splitlines()[-1].startswith("alpha, steps 1 to T: 0.333 0.333 0.333 -> ")
    assert max(map(len, table.splitlines())) < 120


def test_a_run_that_stopped_says_so_on_one_line(tmp_path):
    lines = final_table(write_small_run(tmp_path, final=False, end="aborted")).splitlines()
    assert lines[0] == "The run is aborted after 0 of 1 round(s): the job was aborted"
    assert lines[1].startswith("Scores of test reports, warm start -> no round evaluated yet in 1 min 15 s.")
    assert " ".join(lines[3].split()) == "a 1 6 8.0 -> - 40.0 -> - 2.400 -> - - -> -"


@pytest.mark.parametrize("until", ["start", "end"])
def test_without_an_evaluation_a_sentence_says_so(tmp_path, until):
    if until == "start":
        write_run(tmp_path, until="start")
        expected = "The run is unfinished after 0 of 3 round(s)\nNo scores: the run has no evaluation."
    else:
        RunRecord(tmp_path).write(End(seconds=1, status="failed", reason="no site"))
        expected = "The run is failed after 0 of 0 round(s): no site\nNo scores: the run has no evaluation."
    assert final_table(read_run(tmp_path)) == expected


def test_one_site_has_no_mean_and_a_resumed_run_names_its_start(tmp_path):
    table = final_table(read_run(write_run(tmp_path, sites=["only"], rounds=5, first_round=3)))
    assert "mean of sites" not in table
    assert table.startswith("Scores of test reports, round 2 -> round 5")


def test_columns_stand_under_each_other_whatever_the_names(tmp_path):
    names = ["a", "much-longer-site-name", "b\x1b[31m\nc"]
    table = final_table(read_run(write_run(tmp_path, sites=sorted(names))))
    assert table.isprintable() or set(table) - {"\n"} == {c for c in table if c.isprintable()}
    rows = table.splitlines()[2:]
    rows = rows[: len(rows) // 3 - 1]  # the first table
    assert len({row.index("->") for row in rows if "->" in row}) == 1
