"""`ooc report`: what is read, what is said, and what a real browser makes of the page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ooc.cli.main import main
from ooc.html_report.facts import make_facts
from ooc.html_report.page import make_page
from ooc.reporting.documents import BadDocument, Document, parse_document, read_document, read_documents
from scheduler.verify import verify
from tests import forked
from tests.cli.test_run import environment
from tests.html_report.cases import MIB, recorded, recorded_text, synthetic
from tests.reporting.browser import Browser, find_browser

TRAIN = str(Path(__file__).parents[1] / "scripts" / "train.py")
CHARTS = ("steps", "memory", "schedule", "chunks", "drift")


@pytest.fixture(scope="module")
def run() -> Document:
    return parse_document("run.json", json.loads(recorded_text()))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A run's report, a trace and its plan, as files."""
    trace, plan = synthetic()
    found = {}
    for name, text in (("run", recorded_text()), ("trace", trace.to_json()), ("plan", plan.to_json())):
        found[name] = tmp_path / f"{name}.json"
        found[name].write_text(text)
    return found


# -- what a real run records


def test_a_real_run_records_its_last_planned_step_whole(run: Document) -> None:
    assert run.run is not None
    assert run.trace is not None
    assert run.plan is not None
    assert run.measured is not None
    verify(run.plan, run.trace)
    row = run.run["steps"][run.measured.step_index]
    assert row["mode"] == "planned"
    view = run.view()
    assert view is not None
    # What is born after the last op is written before the next step's first, where no step's row counts it.
    inside = [move for move in view.moves if move.issue_ns >= 0]
    loaded, evicted = (sum(m.nbytes for m in inside if m.kind == kind) for kind in ("load", "evict"))
    assert (loaded, evicted) == (row["loaded_nbytes"], row["evicted_nbytes"])
    assert loaded > 0
    assert all(m.residency is not None for m in view.moves)
    assert all(run.plan.residencies[m.residency].variable == m.variable for m in view.moves if m.residency is not None)
    assert view.duration_ns >= row["duration_s"] * 1e9 * 0.5  # the period holds the step, and what follows it
    assert view.stall_ns <= round(row["stall_s"] * 1e9)  # what was waited for after the last op is no op's


def test_measured_transfers_follow_the_plans_order(run: Document) -> None:
    """A load is asked for after the op before its own has ended; a write after the op that it follows."""
    view = run.view()
    assert view is not None
    assert view.plan is not None
    for move in view.moves:
        assert move.issue_ns <= move.start_ns <= move.stop_ns
        assert move.residency is not None
        stay = view.plan.residencies[move.residency]
        if move.kind == "load":
            op = stay.start.before_op  # type: ignore[union-attr]
            assert (view.op_stop_ns[op - 1] if op else 0) <= move.issue_ns <= view.op_start_ns[op]


def test_a_timeline_is_written_only_when_asked_for() -> None:
    assert "timeline" in recorded()
    trace, plan = synthetic()
    assert len(trace.to_json()) + len(plan.to_json()) < MIB


# -- documents


def test_a_plan_and_its_trace_become_one_document(files: dict[str, Path]) -> None:
    (both,) = read_documents([files["plan"], files["trace"]])
    assert both.view() is not None
    (alone,) = read_documents([files["plan"]])
    assert alone.view() is None
    assert "give its trace" in "".join(make_facts(alone, None, None).warnings)
    other = synthetic(num_blocks=4)[0]
    files["trace"].write_text(other.to_json())
    assert [d.kind for d in read_documents([files["plan"], files["trace"]])] == ["plan", "trace"]


# -- the page without a browser


class _Outline(HTMLParser):
    """Elements that are open, and ids, addresses and texts found."""

    VOID = ("meta", "br", "link", "img", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.data = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("src", "href") and value:
                self.addresses.append(value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] == "script" and text.lstrip().startswith("["):
            self.data += text


def outline(page: str) -> _Outline:
    parser = _Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_is_whole_and_needs_no_network(run: Document) -> None:
    found = outline(make_page([run]))
    assert set(CHARTS) <= set(found.ids)
    assert len(found.ids) == len(set(found.ids))
    assert found.addresses == []
    (data,) = json.loads(found.data)
    assert len(data["ops"]["a"]) == len(run.trace.ops)  # type: ignore[union-attr]


def test_no_text_in_a_file_can_become_markup() -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;"
    document = recorded(policy=evil, ended_by={"type": evil, "message": evil}, unplannable={evil: evil})
    document["timeline"]["trace"]["ops"][0]["name"] = evil
    for variable in document["timeline"]["trace"]["variables"]:
        variable["label"] = variable["kind"] = evil
    body = json.loads(json.dumps(document))
    body["timeline"]["plan"]["trace_fingerprint"] = _fingerprint(body)
    page = make_page([parse_document(evil, body)])
    assert "<img" not in page
    assert page.count("<script") == page.count("</script>") == 2
    outline(page)


def _fingerprint(document: dict[str, Any]) -> str:
    from scheduler.trace import Trace

    return Trace.from_json(json.dumps(document["timeline"]["trace"])).fingerprint()


def test_pages_of_all_kinds(files: dict[str, Path], run: Document) -> None:
    (plan,) = read_documents([files["plan"], files["trace"]])
    for documents in ([read_document(files["trace"])], [plan], [read_document(files["plan"])], [run, plan]):
        found = outline(make_page(documents))
        assert ("comparison" in found.ids) == (len(documents) == 2)
    with pytest.raises(ValueError, match="3 documents"):
        make_page([run, plan, run])


def test_a_comparison_says_what_changed(run: Document) -> None:
    assert run.run is not None
    slower = [{**step, "duration_s": step["duration_s"] * 2} for step in run.run["steps"]]
    page = make_page([run, parse_document("slow.json", {**run.run, "steps": slower})])
    row = re.search(r'<tr><td data-label="">time a step</td>(.*?)</tr>', page)
    assert row is not None
    assert "+100.0%" in row[1]
    assert re.search(r'<td data-label="">budget</td>.*?<td data-label="change">same</td>', page)


# -- bad files


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the file is empty"),
        (b"\x80\x04\x95", "a pickle or an archive"),
        (b"PK\x03\x04", "a pickle or an archive"),
        (b"\xff\xfe{", "not text: byte 0"),
        (b'{"schema": "ooc.report", "budget_n', "cut off at line 1"),
        (b"{'schema': 1}", "not JSON at line 1"),
        (b"[1, 2]", "its 'schema' is None"),
        (b'{"schema": "ooc.fragmentation"}', "'ooc.fragmentation'"),
        (b'{"traceEvents": []}', "ooc fragmentation"),
        (b'{"schema": "ooc.report", "schema_version": 99}', "schema version 99"),
        (b'{"schema": "ooc.plan", "schema_version": 99}', "schema version 99"),
        (b'{"schema": "ooc.trace", "schema_version": 0}', "schema version 0"),
        (b'{"schema": "ooc.trace", "schema_version": 1, "ops": 3}', "not a complete"),
        (b'{"schema": "ooc.report", "schema_version": 1}', "'budget_nbytes' is None"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_file_gets_a_reason(
    tmp_path: Path, body: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(body)
    with pytest.raises(BadDocument, match=re.escape(message)):
        read_document(path)
    assert main(["report", str(path), "-o", str(tmp_path / "x.html")]) == 2
    assert "bad.json" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_every_truncation_of_a_report_is_refused() -> None:
    text = recorded_text()
    for length in range(0, len(text) - 1, len(text) // 50):
        with pytest.raises(BadDocument):
            _ = _from_text(text[:length])


def _from_text(text: str) -> Document:
    from ooc.reporting.documents import _parse

    return _parse("run.json", text)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("steps", 0, "mode"), "fast", "its mode is not one of"),
        (("steps", 0, "stall_s"), -1.0, "'stall_s' is -1.0"),
        (("steps", 0, "duration_s"), "1", "'duration_s' is '1'"),
        (("steps",), {}, "'steps' is a dict"),
        (("budget_nbytes",), True, "'budget_nbytes' is True"),
        (("timeline", "schema_version"), 7, "schema version 7"),
        (("timeline", "op_start_ns"), [1], "not a list of"),
        (("timeline", "stalls"), [], "'stalls' has no columns"),
        (("timeline", "clock"), None, "'clock' is None"),
        (("timeline", "transfers", "kind", 0), "move", "neither 'load' nor 'evict'"),
        (("timeline", "transfers", "variable", 0), 10**6, "unknown variable 1000000"),
        (("timeline", "transfers", "stop_ns", 0), -(10**12), "stops before it starts"),
        (("timeline", "plan", "trace_fingerprint"), "0" * 32, "another trace"),
        (("timeline", "plan", "residencies", 0, "chunks"), [[10**7, 1]], "breaks a rule"),
    ],
)
def test_a_damaged_report_is_refused(path: tuple[Any, ...], value: Any, message: str) -> None:
    document: Any = recorded()
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(BadDocument, match=re.escape(message)):
        parse_document("run.json", document)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadDocument, match="up to"):
        read_document(path)


def test_the_command_line(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.html"
    assert main(["report", str(files["run"]), "-o", str(out), "--endurance", "64TB"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert "58.2 TiB of rated writes" in out.read_text()
    assert main(["report", str(files["run"])]) == 0
    assert files["run"].with_suffix(".html").exists()
    for arguments, message in (
        (["--endurance", "lots"], "endurance 'lots' is not a size"),
        (["-o", str(tmp_path / "no" / "x.html")], "No such file or directory"),
        (["-o", "x", "--trace-json", "y"], "one of them"),
        (["--beside", "x"], "--trace-json"),
    ):
        capsys.readouterr()
        assert main(["report", str(files["run"]), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["report", *[str(files["run"])] * 3]) == 2


def test_from_a_script_to_its_page(tmp_path: Path) -> None:
    """`ooc run --report`, then `ooc report`: of a run that ends well, and of one that does not fit."""
    verdicts = {}
    for budget in ("6MiB", "512KiB"):
        report = tmp_path / f"{budget}.json"
        command = [sys.executable, "-m", "ooc", "run", "--budget", budget, "--report", str(report), TRAIN]
        forked.run(command, env=environment(), timeout=600)
        assert main(["report", str(report), "-o", str(tmp_path / "page.html")]) == 0
        found = re.search(r'data-fits="(\w+)".*?</span>(.*?)</p>', (tmp_path / "page.html").read_text(), re.DOTALL)
        assert found is not None
        verdicts[budget] = found[1], found[2]
    assert verdicts["6MiB"] == ("yes", " Fits")
    assert verdicts["512KiB"][0] == "no"
    assert "the budget is 512.0 KiB" in verdicts["512KiB"][1]


# -- its script without a browser


def test_the_pages_script_draws_only_finite_numbers(run: Document, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node found (apt install nodejs)")
    trace, plan = synthetic(num_blocks=8, share=0.5, policy="sublinear", replayable=True)
    planned = Document(name="plan.json", kind="plan", trace=trace, plan=plan)
    for documents, charts in (([run], list(CHARTS)), ([planned, run], ["memory", "schedule", "chunks"])):
        path = tmp_path / "page.html"
        path.write_text(make_page(documents), encoding="utf-8")
        command = [node, str(Path(__file__).parent / "page_in_node.js"), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["shown"] == charts
        assert all(found["calls"][chart] > 50 for chart in charts)
        assert all(text for texts in found["readouts"].values() for text in texts)


# -- in a real browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium or Chrome found (apt install chromium, or set OOC_BROWSER)")
    with Browser(path) as found:
        yield found


def visible(browser: Browser) -> list[str]:
    return list(browser.evaluate("[...document.querySelectorAll('figure:not([hidden])')].map(f => f.id)"))


def num_colours(browser: Browser, chart: str) -> int:
    """Distinct pixel values on a chart's canvas."""
    return int(
        browser.evaluate(
            f"(() => {{ const c = document.querySelector('#{chart} canvas');"
            "const p = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer);"
            "return new Set(p).size; })()"
        )
    )


def point_at(browser: Browser, chart: str, x: float, y: float) -> str:
    """Move the mouse to a place of a chart (shares of its width and height); the text that it shows."""
    browser.evaluate(f"document.querySelector('#{chart} canvas').scrollIntoView({{block: 'center'}})")
    box = browser.evaluate(
        f"(() => {{ const b = document.querySelector('#{chart} canvas').getBoundingClientRect();"
        "return [b.x, b.y, b.width, b.height]; })()"
    )
    for nudge in range(5):  # a page that has just scrolled may send the pointer away once more
        browser.mouse("mouseMoved", box[0] + x * box[2] + 0.01 * nudge, box[1] + y * box[3])
        text = str(browser.evaluate(f"document.querySelector('#{chart} .readout').innerText"))
        if text:
            return text
    pytest.fail(f"nothing is shown for a place of {chart}")


@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_every_chart(browser: Browser, run: Document, tmp_path: Path, dark: bool) -> None:
    path = tmp_path / "run.html"
    path.write_text(make_page([run]), encoding="utf-8")
    browser.open(path, dark=dark)
    assert browser.complaints == []
    assert browser.requests == [path.as_uri()]
    assert visible(browser) == list(CHARTS)
    assert all(num_colours(browser, chart) > 4 for chart in CHARTS)
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    browser.screenshot(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 20_000


def test_pointing_says_what_is_there(browser: Browser, run: Document, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    path.write_text(make_page([run]), encoding="utf-8")
    browser.open(path)
    text = point_at(browser, "memory", 0.5, 0.5)
    assert re.search(r"live \d+\.\d MiB, resident \d+\.\d MiB in \d+ variables", text)
    listed = browser.evaluate("document.querySelectorAll('#memory .readout tr').length")
    assert listed == min(14, int(re.search(r"in (\d+) variables", text)[1]))  # type: ignore[index]
    texts = {point_at(browser, "chunks", x / 10, y / 10) for x in range(2, 10, 2) for y in range(2, 9, 2)}
    assert any("The same chunk is mapped for #" in text for text in texts)
    assert "planned" in point_at(browser, "drift", 0.5, 0.5)
    assert "step " in point_at(browser, "steps", 0.5, 0.5)
    view = run.view()
    assert view is not None
    inside = [move for move in view.moves if move.start_ns > 0 and move.stop_ns < view.duration_ns]
    for move in (max((m for m in inside if m.kind == kind), key=lambda m: m.nbytes) for kind in ("load", "evict")):
        left, right, width = 64, 10, browser.evaluate("document.querySelector('#schedule canvas').clientWidth")
        at = left + (move.start_ns + move.stop_ns) / 2 / view.duration_ns * (width - left - right)
        text = point_at(browser, "schedule", at / width, 0.55 if move.kind == "load" else 0.8)
        assert f"{move.kind} #{move.variable} " in text
    assert browser.complaints == []


def test_zooming_and_choosing(browser: Browser, run: Document, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(synthetic()[0].to_json())
    path = tmp_path / "two.html"
    path.write_text(make_page([run, read_document(tmp_path / "trace.json")]), encoding="utf-8")
    browser.open(path)
    whole = browser.evaluate("document.getElementById('range').textContent")
    browser.evaluate("document.querySelector('[data-zoom=\"in\"]').click()")
    near = browser.evaluate("document.getElementById('range').textContent")
    assert near != whole
    browser.evaluate("document.querySelector('[data-zoom=\"all\"]').click()")
    assert browser.evaluate("document.getElementById('range').textContent") == whole
    browser.evaluate("document.querySelector('[data-document=\"1\"]').click()")
    assert visible(browser) == ["memory", "schedule"]  # a trace has no chunks and no plan
    assert browser.complaints == []


def test_a_phone_shows_it_without_scrolling_sideways(run: Document, tmp_path: Path) -> None:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium or Chrome found (apt install chromium, or set OOC_BROWSER)")
    page = tmp_path / "run.html"
    page.write_text(make_page([run, run]), encoding="utf-8")
    with Browser(path, width=390, height=844, scale=2.0) as phone:
        phone.open(page, dark=True)
        assert phone.evaluate("document.documentElement.scrollWidth") <= 390
        assert visible(phone) == list(CHARTS)
        display = "getComputedStyle(t.querySelector('tr')).display"
        shown = dict(phone.evaluate(f"[...document.querySelectorAll('.table')].map(t => [t.id, {display}])"))
        assert shown.pop("compared") == "table-row" and set(shown.values()) == {"flex"}  # the others' rows are cards
        assert phone.complaints == []


def test_five_thousand_ops_fit_in_a_page(browser: Browser, tmp_path: Path) -> None:
    trace, plan = synthetic(num_blocks=834, policy="on_demand")
    assert len(trace.ops) > 5000
    (tmp_path / "trace.json").write_text(trace.to_json())
    (tmp_path / "plan.json").write_text(plan.to_json())
    page = make_page(read_documents([tmp_path / "plan.json", tmp_path / "trace.json"]))
    assert len(page) < 10 * MIB
    path = tmp_path / "large.html"
    path.write_text(page, encoding="utf-8")
    browser.open(path)
    assert browser.complaints == []
    assert visible(browser) == ["memory", "schedule", "chunks"]
