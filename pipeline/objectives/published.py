"""Failure rates that large fleets published, to compare one's own with. Sources: docs/objectives.md."""

from __future__ import annotations

from typing import Any

PUBLISHED: tuple[dict[str, Any], ...] = (
    {
        "fleet": "Llama 3 405B (16,384 H100, 54 days)",
        "cause": "All unplanned",
        "per_million_gpu_hours": 19.7,
        "source": "arXiv 2407.21783, Table 5: 419 interruptions in 21.2M GPU-hours",
    },
    {
        "fleet": "Llama 3 405B (16,384 H100, 54 days)",
        "cause": "GPU",
        "per_million_gpu_hours": 7.0,
        "source": "arXiv 2407.21783, Table 5: 148 faulty GPUs",
    },
    {
        "fleet": "Llama 3 405B (16,384 H100, 54 days)",
        "cause": "GPU memory",
        "per_million_gpu_hours": 3.4,
        "source": "arXiv 2407.21783, Table 5: 72 HBM3",
    },
    {
        "fleet": "Llama 3 405B (16,384 H100, 54 days)",
        "cause": "Network",
        "per_million_gpu_hours": 1.6,
        "source": "arXiv 2407.21783, Table 5: 35 network switches and cables",
    },
    {
        "fleet": "Meta RSC-1 (A100, 8 GPUs a node)",
        "cause": "All hardware",
        "per_million_gpu_hours": 33.9,
        "per_thousand_node_days": 6.5,
        "source": "arXiv 2410.21680: 6.50 failures per 1,000 node-days",
    },
    {
        "fleet": "Meta RSC-2 (A100, 8 GPUs a node)",
        "cause": "All hardware",
        "per_million_gpu_hours": 12.2,
        "per_thousand_node_days": 2.34,
        "source": "arXiv 2410.21680: 2.34 failures per 1,000 node-days",
    },
    {
        "fleet": "Delta (H100)",
        "cause": "GPU memory",
        "per_million_gpu_hours": 11.3,
        "source": "arXiv 2503.11901: an uncorrectable ECC error every 88,768 GPU-hours",
    },
    {
        "fleet": "Delta (A100)",
        "cause": "GPU memory",
        "per_million_gpu_hours": 3.5,
        "source": "arXiv 2503.11901: an uncorrectable ECC error every 283,271 GPU-hours",
    },
)
"""Rates per million GPU-hours. MTTF of a node of 8 GPUs in days: 1e6 / rate / 8 / 24."""
