"""Makes the PyTorch files that trainer/tests/weights.rs reads, with what PyTorch itself gets out of them.

    pip install torch numpy safetensors
    python trainer/tests/weights/golden.py

LeNet (pytorch-cifar's, for one channel of 28x28) is trained for three epochs on fashion-mini, which lies in
data/assets; then its weights are saved in every way that users save them. `expected.json` has the number of test images
that PyTorch classifies right with each file's weights, and the mean loss; `layouts.json` the values of layouts.pth.
"""

import gzip
import json
import pathlib
from collections import OrderedDict

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

HERE = pathlib.Path(__file__).parent
ASSETS = HERE.parents[2] / "data/assets/fashion-mini"


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(256, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def read(split):
    """Images normalised as trainer does it, and labels."""
    images = gzip.decompress((ASSETS / f"{split}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((ASSETS / f"{split}-labels-idx1-ubyte.gz").read_bytes())[8:]
    x = torch.from_numpy(np.frombuffer(images, np.uint8).copy()).view(-1, 1, 28, 28).float() / 255
    return (x - 0.2860) / 0.3530, torch.from_numpy(np.frombuffer(labels, np.uint8).copy()).long()


def train(model):
    x, y = read("train")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(3):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


def result(state):
    """What PyTorch gets from a state, in float32."""
    model = LeNet()
    model.load_state_dict(state)
    x, y = read("t10k")
    with torch.no_grad():
        logits = model(x)
    return {"correct": int((logits.argmax(1) == y).sum()), "total": len(y), "loss": F.cross_entropy(logits, y).item()}


def shared(state):
    """The same tensors as views of one storage, the matrices transposed in it."""
    sizes = [t.numel() for t in state.values()]
    flat, start, views = torch.empty(sum(sizes)), 0, OrderedDict()
    for (name, tensor), size in zip(state.items(), sizes):
        place = flat[start : start + size]
        view = place.view(tensor.shape[::-1]).permute(*range(tensor.dim())[::-1])
        view.copy_(tensor)
        views[name] = view
        start += size
    return views


def save_models():
    model = LeNet()
    train(model)
    state = model.state_dict()
    expected = {}

    def save(name, values, content, **options):
        torch.save(content, HERE / name, **options)
        expected[name] = result(values)

    # pytorch-cifar's checkpoint of a DataParallel model
    wrapped = nn.DataParallel(model).state_dict()
    save("net_module.pth", state, {"net": wrapped, "acc": 84.3, "epoch": 3})
    # a training script's checkpoint of a compiled model in half precision, with an average beside it
    half = {k: v.half() for k, v in state.items()}
    compiled = OrderedDict((f"_orig_mod.{k}", v) for k, v in half.items())
    small = {k: torch.zeros_like(v) for k, v in list(half.items())[-2:]}
    momentum = {"state": {0: {"momentum_buffer": torch.zeros(10)}}, "param_groups": [{"lr": 0.02, "params": [0]}]}
    content = {"epoch": 3, "arch": "lenet", "optimizer": momentum, "state_dict_ema": small, "state_dict": compiled}
    save("state_dict_half.pt", half, content)
    # PyTorch before 1.6
    brief = OrderedDict((k, v.bfloat16()) for k, v in state.items())
    save("legacy_bfloat16.pth", brief, {"model": brief}, _use_new_zipfile_serialization=False)
    # all weights in one storage, none of the matrices contiguous
    save("shared_storage.pth", state, shared(state))
    save_file({k: v.bfloat16().contiguous() for k, v in state.items()}, HERE / "bfloat16.safetensors")
    expected["bfloat16.safetensors"] = result(brief)
    write("expected.json", expected)


def save_layouts():
    """Small tensors of every type and layout that a state dict may hold."""
    base = torch.arange(24, dtype=torch.float32) / 7
    grid = base.view(2, 3, 4)
    tensors = {
        "transposed": grid.permute(2, 0, 1),
        "strided": base[1::5],
        "offset": base[20:],
        "expanded": base[3].expand(2, 2),
        "channels_last": base.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(-2.5),
        "empty": torch.zeros(0, 3),
        "double": torch.tensor([0.1, 1e-300, -1e30], dtype=torch.float64),
        "half": torch.tensor([0.1, 65504.0, 6e-8]).half(),
        "bfloat16": torch.tensor([0.1, -3e38, 1e-40]).bfloat16(),
        "parameter": nn.Parameter(torch.tensor([1.5, float("inf")])),
    }
    counters = {"bn.num_batches_tracked": torch.tensor(1234), "mask": torch.tensor([True, False])}
    torch.save(tensors | counters, HERE / "layouts.pth")
    torch.save(tensors | counters, HERE / "layouts_legacy.pth", _use_new_zipfile_serialization=False)
    values = {k: {"shape": list(v.shape), "values": numbers(v)} for k, v in tensors.items()}
    write("layouts.json", values)


def save_whole_model():
    """A model, not its state dict, as PyTorch before 1.6 saved it. Its class has no source code, which would be in the file too."""
    exec("class Net(nn.Module):\n    pass", globals())
    model = Net()  # noqa: F821
    model.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    torch.save(model, HERE / "whole_model_legacy.pth", _use_new_zipfile_serialization=False)


def numbers(tensor):
    """The float32 values by their bits, which JSON keeps whatever they are."""
    return [int(bits) for bits in tensor.detach().float().contiguous().view(-1).view(torch.int32).numpy().view(np.uint32)]


def write(name, content):
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    (HERE / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    save_models()
    save_layouts()
    save_whole_model()
