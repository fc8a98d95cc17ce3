"""Evaluates what `trainer export` writes with ONNX Runtime and with PyTorch, for trainer/tests/onnx.rs.

    python trainer/tests/onnx_check.py models            compares models with logits; one JSON object per line of stdin
    python trainer/tests/onnx_check.py predict FILE...   classifies pictures with an exported run
    python trainer/tests/onnx_check.py fold PLAIN FOLDED IMAGES LOGITS   folds torchvision's ResNet-18

Each prints JSON.
"""

import json
import sys

import numpy as np


def floats(path, shape):
    return np.fromfile(path, np.float32).reshape(shape)


def session(path):
    import onnxruntime

    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def models():
    """For {"model": FILE, "images": FILE, "shape": [N, C, H, W], "logits": FILE}: the largest difference and the model's nodes."""
    import onnx

    for line in sys.stdin:
        case = json.loads(line)
        onnx.checker.check_model(case["model"], full_check=True)
        nodes = onnx.load(case["model"]).graph.node
        images, runtime = floats(case["images"], case["shape"]), session(case["model"])
        logits = floats(case["logits"], [len(images), -1])
        worst = 0.0
        # All images, and one alone: the batch has no fixed size.
        for batch in [slice(None), slice(0, 1)]:
            [got] = runtime.run(["logits"], {"images": images[batch]})
            assert got.shape == logits[batch].shape, (got.shape, logits[batch].shape)
            worst = max(worst, float(np.abs(got - logits[batch]).max()))
        result = {"worst": worst, "largest": float(np.abs(logits).max()), "nodes": [node.op_type for node in nodes]}
        print(json.dumps(result), flush=True)


def predict(path, *pictures):
    """The class and its probability of each picture, by the metadata of the model alone."""
    from PIL import Image

    runtime = session(path)
    metadata = runtime.get_modelmeta().custom_metadata_map
    classes, mean, std = (json.loads(metadata[key]) for key in ["classes", "mean", "std"])
    [_, channels, height, width] = runtime.get_inputs()[0].shape
    predictions = []
    for picture in pictures:
        image = Image.open(picture).convert("L" if channels == 1 else "RGB")
        assert image.size == (width, height)
        pixels = np.asarray(image, np.float32).reshape(height, width, channels).transpose(2, 0, 1)
        images = pixels / 255
        if metadata["normalised"] == "by the caller":
            images = (images - np.float32(mean).reshape(-1, 1, 1)) / np.float32(std).reshape(-1, 1, 1)
        [logits] = runtime.run(None, {"images": images[None].astype(np.float32)})
        odds = np.exp(logits[0].astype(np.float64) - logits.max())
        best = int(odds.argmax())
        predictions.append({"class": classes[best], "index": best, "probability": odds[best] / odds.sum()})
    print(json.dumps({"predictions": predictions, "metadata": metadata}))


def fold_batch_norms(model, path):
    """Gives a model the form of the weights of `trainer export --fold`, and loads them (docs/weights.md has these lines)."""
    import safetensors.torch
    import torch
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    def replace(name, module):
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module)

    model.eval()
    with safetensors.safe_open(path, "pt") as file:
        pairs = json.loads(file.metadata()["folded"])
    for conv, norm in pairs:
        replace(conv, fuse_conv_bn_eval(model.get_submodule(conv), model.get_submodule(norm)))
        replace(norm, torch.nn.Identity())
    folded = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(safetensors.torch.load_file(path))
    return folded


def fold(plain, path, images, logits):
    """Compares the folded weights with those of PyTorch's own folding, and the logits."""
    import safetensors.torch
    import torch
    import torchvision

    model = torchvision.models.resnet18(num_classes=10)
    model.load_state_dict(safetensors.torch.load_file(plain))
    of_pytorch = fold_batch_norms(model, path)
    ours = model.state_dict()
    difference = max(float((ours[name] - of_pytorch[name]).abs().max() / of_pytorch[name].abs().max()) for name in ours)
    images = torch.from_numpy(floats(images, [-1, 3, 32, 32]))
    expected = torch.from_numpy(floats(logits, [len(images), 10]))
    with torch.no_grad():
        worst = float((model(images) - expected).abs().max())
    norms = sum(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
    print(json.dumps({"weights": difference, "worst": worst, "largest": float(expected.abs().max()), "norms": norms}))


if __name__ == "__main__":
    {"models": models, "predict": predict, "fold": fold}[sys.argv[1]](*sys.argv[2:])
