#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains a small network on scikit-learn's handwritten digits with four data-parallel ranks and keeps the gradients.

    python3 -m venv .venv && .venv/bin/pip install numpy scikit-learn
    .venv/bin/python scripts/make-gradients.py

Writes to tests/data, for each rank r:

    grads.{r}.safetensors        f32 gradients of rank r, one tensor a parameter and snapshot
    grads-bf16.{r}.safetensors   the same, rounded to bf16

and beside them what an all-reduce of those files must give:

    grads.sum.safetensors        the sum over the ranks, computed by numpy in float64 from the f32 files
    grads-bf16.sum.safetensors   the same from the bf16 files

A tensor is called step{N}.{parameter}; snapshots lie a few hundred steps apart, so that magnitudes differ as they do
in training: large and dense at first, many tiny ones and exact zeros (dead ReLUs) later.

The draw is seeded. Another BLAS may add in another order and give other last bits; the sums are made from the files
just written, so they always belong together.
"""

import argparse
import json
import pathlib

import numpy
from sklearn.datasets import load_digits

RANKS = 4
LAYERS = (64, 127, 96, 10)  # 127 is prime: fc0.bias does not divide evenly among ranks
BATCH = 16  # samples of one rank in one step
RATE = 0.05
SNAPSHOTS = (1, 250, 500, 900)


def parameters(draw):
    """He-initialised weights and biases of the network."""
    net = {}
    for layer, (inputs, outputs) in enumerate(zip(LAYERS, LAYERS[1:])):
        scale = numpy.sqrt(2 / inputs)
        net[f"fc{layer}.weight"] = draw.normal(0, scale, (outputs, inputs)).astype(numpy.float32)
        net[f"fc{layer}.bias"] = numpy.zeros(outputs, numpy.float32)
    return net


def forward(net, images):
    """Activations of every layer, the last one as logits."""
    activations = [images]
    last = len(LAYERS) - 2
    for layer in range(last + 1):
        z = activations[-1] @ net[f"fc{layer}.weight"].T + net[f"fc{layer}.bias"]
        activations.append(z if layer == last else numpy.maximum(z, 0))
    return activations


def gradients(net, images, labels):
    """Gradients of the mean cross entropy on one rank's part of the batch, and that loss."""
    activations = forward(net, images)
    logits = activations[-1] - activations[-1].max(axis=1, keepdims=True)
    probabilities = numpy.exp(logits)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    rows = numpy.arange(len(labels))
    loss = float(-numpy.log(probabilities[rows, labels] + 1e-12).mean())
    delta = probabilities
    delta[rows, labels] -= 1
    delta /= len(labels)
    grads = {}
    for layer in reversed(range(len(LAYERS) - 1)):
        grads[f"fc{layer}.weight"] = delta.T @ activations[layer]
        grads[f"fc{layer}.bias"] = delta.sum(axis=0)
        if layer:
            delta = (delta @ net[f"fc{layer}.weight"]) * (activations[layer] > 0)
    return grads, loss


def to_bf16(values):
    """Rounds f32 to bf16, ties to even; gives the 16-bit patterns. Gradients are finite, so NaN needs no care."""
    bits = values.astype(numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def from_bf16(patterns):
    """The f32 values of bf16 patterns, exact."""
    return (patterns.astype(numpy.uint32) << 16).view(numpy.float32)


def write(path, tensors, dtype):
    """One safetensors file (by hand: numpy has no bf16 to give to the package); `dtype` names what the bytes are."""
    header, offset = {"__metadata__": {"made_by": "scripts/make-gradients.py"}}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for values in tensors.values():
            file.write(numpy.ascontiguousarray(values).tobytes())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = pathlib.Path(__file__).resolve().parent
    parser.add_argument("--out", type=pathlib.Path, default=here.parent / "tests" / "data")
    parser.add_argument("--seed", type=int, default=20260101)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(numpy.float32)
    draw = numpy.random.default_rng(args.seed)
    order = draw.permutation(len(labels))
    parts = numpy.array_split(order, RANKS)  # a rank never sees another's samples
    net = parameters(draw)

    kept = [{} for _ in range(RANKS)]
    for step in range(1, SNAPSHOTS[-1] + 1):
        found = []
        for part in parts:
            chosen = draw.choice(part, BATCH, replace=False)
            found.append(gradients(net, images[chosen], labels[chosen]))
        if step in SNAPSHOTS:
            for rank, (grads, _) in enumerate(found):
                kept[rank].update({f"step{step:04}.{name}": grad.astype(numpy.float32) for name, grad in grads.items()})
            accuracy = (forward(net, images)[-1].argmax(axis=1) == labels).mean()
            mean_loss = sum(loss for _, loss in found) / RANKS
            print(f"step {step:4}: loss {mean_loss:.4f}, accuracy {accuracy:.3f}")
        for name in net:
            net[name] -= RATE * sum(grads[name] for grads, _ in found) / RANKS

    rounded = [{name: to_bf16(grad) for name, grad in grads.items()} for grads in kept]
    for rank in range(RANKS):
        write(args.out / f"grads.{rank}.safetensors", kept[rank], "F32")
        write(args.out / f"grads-bf16.{rank}.safetensors", rounded[rank], "BF16")
    names = kept[0].keys()
    exact = {name: sum(grads[name].astype(numpy.float64) for grads in kept) for name in names}
    exact_rounded = {name: sum(from_bf16(grads[name]).astype(numpy.float64) for grads in rounded) for name in names}
    write(args.out / "grads.sum.safetensors", exact, "F64")
    write(args.out / "grads-bf16.sum.safetensors", exact_rounded, "F64")

    bytes_written = sum(path.stat().st_size for path in args.out.glob("grads*.safetensors"))
    elements = sum(grad.size for grad in kept[0].values())
    print(f"{len(names)} tensors, {elements} elements a rank; {bytes_written / 1e6:.1f} MB in {args.out}")


if __name__ == "__main__":
    main()
