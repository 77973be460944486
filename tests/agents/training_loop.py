"""One rank of a real data-parallel training in NumPy: a small network, an all-reduce over sockets, reported steps.

    python training_loop.py FOLDER STEPS SLOW FLIPPED

RANK and WORLD_SIZE are in the environment, as a launcher sets them. Rank SLOW computes SLOWER seconds longer in each
step; in rank FLIPPED one bit of a parameter flips in the middle of the training. In FOLDER the ranks find each other. A
rank ends when its standard input closes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import numpy as np

from agents.training import Steps, replica_digest

SLOWER = 0.05
SHAPES = ((16, 32), (32, 4))


def reduced(values, rank, world, peers):
    """Returns the mean over all ranks, bit-identical everywhere: rank 0 adds in rank order and sends the sum back."""
    if rank:
        peers[0].sendall(values.tobytes())
        return np.frombuffer(received(peers[0], values.nbytes), values.dtype).copy()
    total = values.copy()
    for peer in peers:
        total += np.frombuffer(received(peer, values.nbytes), values.dtype)
    total /= world
    for peer in peers:
        peer.sendall(total.tobytes())
    return total


def received(peer, size):
    data = bytearray()
    while len(data) < size:
        data += peer.recv(size - len(data))
    return bytes(data)


def connected(folder, rank, world):
    """Returns rank 0's sockets to the other ranks, in order; for the others one to rank 0."""
    path = str(folder / "ring")
    if rank:
        peer = socket.socket(socket.AF_UNIX)
        until = time.monotonic() + 30
        while True:
            try:
                peer.connect(path)
                peer.sendall(bytes([rank]))
                return [peer]
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.01)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen(world)
        found = [door.accept()[0] for _ in range(world - 1)]
    return sorted(found, key=lambda peer: received(peer, 1)[0])


def gradients(weights, inputs, labels):
    """Returns loss and gradients of a network of two layers with softmax."""
    hidden = np.maximum(inputs @ weights[0], 0)
    scores = hidden @ weights[1]
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(chances[rows, labels]).mean()
    chances[rows, labels] -= 1
    chances /= len(labels)
    back = (chances @ weights[1].T) * (hidden > 0)
    return loss, [inputs.T @ back, hidden.T @ chances]


def main(folder, count, slow, flipped):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    peers, rng = connected(folder, rank, world), np.random.default_rng(rank)
    same = np.random.default_rng(7)
    weights = [same.standard_normal(shape).astype(np.float32) * 0.2 for shape in SHAPES]
    truth = same.standard_normal((16, 4)).astype(np.float32)
    steps = Steps(group="dp0")
    reports = []
    for number in range(1, count + 1):
        inputs = rng.standard_normal((64, 16)).astype(np.float32)
        with steps.step(tokens=len(inputs)) as step:
            loss, own = gradients(weights, inputs, (inputs @ truth).argmax(1))
            if rank == slow:
                time.sleep(SLOWER)
            step.computed()
            flat = reduced(np.concatenate([g.ravel() for g in own]).astype(np.float32), rank, world, peers)
            step.communicated()
            at = 0
            for weight in weights:
                weight -= 0.5 * flat[at : at + weight.size].reshape(weight.shape)
                at += weight.size
            if rank == flipped and number == count // 2:
                weights[1].view(np.uint32)[3, 2] ^= 1 << 20  # of the mantissa; the least bit may be rounded away later
            norm = float(np.linalg.norm(flat))
            step.loss(loss)
            step.gradient_norm(norm)
            for layer, weight in enumerate(weights):
                step.digest(f"layer{layer}", replica_digest(weight))
        reports.append({"loss": float(loss), "norm": norm})
    summary = {"rank": rank, "dropped": steps.dropped, "refused": steps.refused, "steps": reports}
    sys.stdout.write(json.dumps(summary) + "\n")
    sys.stdout.flush()
    sys.stdin.read()  # stay until the test has read the last step


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
