"""torchvision's networks, for `make_reference.py`: NETWORKS maps our registry's names to a constructor with ten classes and the
shape of the images. The sizes differ between networks: 224x224, others, and 32x32, where the last stage has one pixel.
FROZEN maps names to networks of which modules are frozen.

    pip install torch torchvision
"""

from torch import nn
from torchvision import models, ops

CLASSES = 10


def make(constructor):
    def network():
        network = constructor(num_classes=CLASSES)
        for module in network.modules():
            if isinstance(module, nn.Dropout | ops.StochasticDepth):
                module.p = 0
        return network

    return network


NETWORKS = {
    "resnet18_imagenet": (make(models.resnet18), (3, 224, 224)),
    "resnet34_imagenet": (make(models.resnet34), (3, 64, 97)),
    "resnet50_imagenet": (make(models.resnet50), (3, 96, 64)),
    "resnet101_imagenet": (make(models.resnet101), (3, 64, 64)),
    "resnet152_imagenet": (make(models.resnet152), (3, 64, 64)),
    "mobilenet_v2_imagenet": (make(models.mobilenet_v2), (3, 32, 32)),
    "efficientnet_b0_imagenet": (make(models.efficientnet_b0), (3, 97, 64)),
}

FROZEN = {
    # The usual first layers, a batch norm and a convolution between trained layers.
    "frozen_resnet18_imagenet": ("resnet18_imagenet", (3, 64, 64), ["conv1", "bn1", "layer1", "layer2.1.bn2", "layer3.0.conv2"]),
}


def freeze(network, names):
    """`requires_grad = False`, and batch norms in evaluation mode where both weight and bias are frozen."""
    within = lambda name: any(name == module or name.startswith(module + ".") for module in names)
    for name, parameter in network.named_parameters():
        parameter.requires_grad = not within(name)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d) and not (module.weight.requires_grad or module.bias.requires_grad):
            module.eval()
