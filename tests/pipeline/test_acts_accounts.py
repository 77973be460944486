"""Accounts of jobs: where Slurm does not enforce them, any bytes of the job's owner. They must stop no act."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pipeline.acts.adapters.slurm import MAX_ACCOUNT, parse_accounts, run_command
from pipeline.acts.adapters.slurmrestd import Slurmrestd, parse_jobs
from pipeline.config.acts import SlurmAccess
from tests.pipeline.acts_world import ON


def test_bytes_that_are_no_utf8_are_shown_as_unknown() -> None:
    code = r"import sys; sys.stdout.buffer.write(b'81|ab\xff\n82|team\n')"
    assert parse_accounts(run_command([sys.executable, "-c", code]).stdout) == {"81": "ab\ufffd", "82": "team"}


def test_an_account_is_cut_and_controls_no_terminal() -> None:
    found = parse_accounts(f"81|\x1b[2J{'x' * 1024}\n")
    assert (found["81"][:5], len(found["81"])) == (" [2Jx", MAX_ACCOUNT)
    row = {"job_id": 81, "job_state": ["RUNNING"], "account": f"a\nb\x1b{'x' * 1024}"}
    account = parse_jobs({"jobs": [row]})["81"].account
    assert (account[:5], len(account)) == ("a b x", MAX_ACCOUNT)


@contextmanager
def serve(body: bytes) -> Iterator[str]:
    """Answers each request with the same body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *given: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_state_of_slurmrestd_is_read_also_with_an_account_that_is_no_utf8(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("SLURM_JWT=x")
    row = {"job_id": 81, "job_state": ["RUNNING"], "account": "BYTES"}
    body = json.dumps({"jobs": [row], "nodes": []}).encode().replace(b"BYTES", b"ab\xff")
    with serve(body) as url:
        rest = Slurmrestd(replace(ON, slurm=SlurmAccess(url=url, user="root", token_file=token)))
        assert rest.read_state(0).jobs["81"].account == "ab\ufffd"
