"""A worker of the GPU canary that needs no GPU: writes fixed lines and runs for the given time.

python gpu_worker_program.py INDEX SECONDS
"""

from __future__ import annotations

import os
import sys
import time

from agents.collectors.canary.cpu_program import write_line

if __name__ == "__main__":
    index = sys.argv[1]
    write_line({"device": index, "begin": True, "canary": "gpu.0", "version": "v"})
    data = {"device": index, "canary": "gpu.0", "version": "v", "digest": os.environ["CUDA_VISIBLE_DEVICES"]}
    write_line({**data, "expected": f"GPU-{index}", "runs": 5, "pid": os.getpid()})
    time.sleep(float(sys.argv[2]))
