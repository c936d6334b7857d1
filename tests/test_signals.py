"""How a command ends when it is asked to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INTERRUPTED = """
import os, signal, sys
from nhgd.cli import _signals as signals

signal.signal(signal.SIGINT, signal.default_int_handler)
with signals.raised():
    try:
        exec("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    except KeyboardInterrupt as stop:
        code = 128 + signals.number_of(stop)
sys.exit(code)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_within_code_compiled_from_a_string_keeps_the_exit_code(tmp_path):
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    found = subprocess.run(
        [sys.executable, "-m", "interrupted"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        timeout=120,
    )
    assert found.returncode == 130
