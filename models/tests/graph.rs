//! Graphs of networks: what is traced, what is refused, and which batch norms are folded. `trainer/tests/onnx.rs` evaluates them.

use burn::tensor::Device;
use models::graph::{Graph, GraphError, Node, Operation, Value};
use models::{Context, Network, Spec};

const SPEC: Spec = Spec { num_classes: 10, in_channels: 3, image_size: [32, 32] };

fn network(name: &str) -> Network {
    models::build(name, &SPEC, 1, &Device::flex()).unwrap()
}

/// Counts the nodes: convolutions, batch norms, all.
fn count(graph: &Graph) -> [usize; 3] {
    let of = |is: fn(&Operation) -> bool| graph.nodes.iter().filter(|node| is(&node.operation)).count();
    [
        of(|operation| matches!(operation, Operation::Conv2d(_))),
        of(|operation| matches!(operation, Operation::BatchNorm { .. })),
        graph.nodes.len(),
    ]
}

#[test]
fn a_graph_has_the_operations_the_weights_and_the_shapes_of_its_network() {
    let graph = Graph::from_network(&network("lenet"), &SPEC).unwrap();
    let line = |(index, node): (usize, &Node)| {
        let inputs: Vec<_> = node
            .inputs
            .iter()
            .map(|input| match input {
                Value::Images => "images".to_owned(),
                Value::Node(index) => index.to_string(),
            })
            .collect();
        let operation = format!("{:?}", node.operation);
        let name = operation.split([' ', '(']).next().unwrap();
        format!("{index} {name} {} [{}] {:?}", inputs.join(" "), node.weights.join(" "), node.shape)
    };
    let lines: Vec<_> = graph.nodes.iter().enumerate().map(line).collect();
    let expected = [
        "0 Conv2d images [conv1.weight conv1.bias] [6, 28, 28]",
        "1 Activation 0 [] [6, 28, 28]",
        "2 MaxPool 1 [] [6, 14, 14]",
        "3 Conv2d 2 [conv2.weight conv2.bias] [16, 10, 10]",
        "4 Activation 3 [] [16, 10, 10]",
        "5 MaxPool 4 [] [16, 5, 5]",
        "6 Flatten 5 [] [400]",
        "7 Linear 6 [fc1.weight fc1.bias] [120]",
        "8 Activation 7 [] [120]",
        "9 Linear 8 [fc2.weight fc2.bias] [84]",
        "10 Activation 9 [] [84]",
        "11 Linear 10 [fc3.weight fc3.bias] [10]",
    ];
    assert_eq!(lines, expected);
    assert_eq!((graph.image_shape, graph.output), ([3, 32, 32], Value::Node(11)));
}

#[test]
fn batch_norms_behind_a_convolution_are_folded_and_no_others() {
    // Batch norms before and after. Pre-activation networks keep those in front of a convolution whose input others read too,
    // airbench94 those behind a pooling.
    for (name, before, after) in [
        ("lenet", 0, 0),
        ("vgg11", 8, 0),
        ("resnet18", 20, 0),
        ("preact_resnet18", 16, 8),
        ("senet18", 17, 8),
        ("densenet121", 120, 62),
        ("airbench94", 6, 3),
        ("shufflenetv2_x0_5", 56, 0),
        ("googlenet", 64, 0),
        ("efficientnet_b0", 48, 0),
        ("mobilenet_v2_imagenet", 52, 0),
    ] {
        let network = network(name);
        let graph = Graph::from_network(&network, &SPEC).unwrap();
        let [convolutions, norms, nodes] = count(&graph);
        let state = models::state_dict(&network);
        let tensors = state.len();
        let biases = graph.nodes.iter().filter(|node| matches!(node.operation, Operation::Conv2d(_)));
        let biases = biases.filter(|node| node.weights.len() == 2).count();
        let (graph, state, folded) = graph.fold_batch_norms(state);
        assert_eq!((norms, count(&graph)), (before, [convolutions, after, nodes - (before - after)]), "{name}");
        assert_eq!(folded.len(), before - after, "{name}");
        // A folded batch norm takes four tensors with it, and leaves a bias.
        let new_biases = graph.nodes.iter().filter(|node| matches!(node.operation, Operation::Conv2d(_)));
        let new_biases = new_biases.filter(|node| node.weights.len() == 2).count() - biases;
        assert_eq!(state.len(), tensors - 4 * folded.len() + new_biases, "{name}");
        let names: Vec<_> = state.iter().map(|tensor| tensor.name.as_str()).collect();
        for node in &graph.nodes {
            assert!(node.weights.iter().all(|weight| names.contains(&weight.as_str())), "{name}: {:?}", node.weights);
        }
    }
}

#[test]
fn folding_keeps_the_order_of_the_state_dict() {
    let network = network("resnet18");
    let (_, state, folded) =
        Graph::from_network(&network, &SPEC).unwrap().fold_batch_norms(models::state_dict(&network));
    let names: Vec<_> = state.iter().take(4).map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["conv1.weight", "conv1.bias", "layer1.0.conv1.weight", "layer1.0.conv1.bias"]);
    let shortcut = folded.iter().find(|pair| pair.conv == "layer2.0.shortcut.0").unwrap();
    assert_eq!(shortcut.norm, "layer2.0.shortcut.1");
}

#[test]
fn an_operation_that_is_not_recorded_is_refused() {
    let network = network("lenet");
    let trace = |change: fn(burn::tensor::Tensor<4>) -> burn::tensor::Tensor<4>| {
        Graph::trace(&network, [3, 32, 32], |images| network.forward(change(images), &Context::eval()))
    };
    assert!(trace(|images| images).is_ok());
    for change in [|images| images * 0.5, |images: burn::tensor::Tensor<4>| images.swap_dims(2, 3)] {
        let error = trace(change).unwrap_err();
        assert!(matches!(error, GraphError::UnknownOperand { .. }), "{error}");
        assert!(error.to_string().ends_with("after the images has an operand that no operation of `ops` has computed"));
    }
    let logits = Graph::trace(&network, [3, 32, 32], |images| network.forward(images, &Context::eval()) * 2.0);
    assert_eq!(logits.unwrap_err(), GraphError::UnknownLogits);
    // The weights of another network are unknown too.
    let other = self::network("lenet");
    let error = Graph::trace(&other, [3, 32, 32], |images| network.forward(images, &Context::eval())).unwrap_err();
    assert!(matches!(error, GraphError::UnknownOperand { .. }), "{error}");
}

#[test]
fn training_is_refused() {
    let network = network("resnet18");
    let error = Graph::trace(&network, [3, 32, 32], |images| network.forward(images, &Context::train())).unwrap_err();
    assert!(matches!(error, GraphError::UnknownOperand { .. }), "{error}");
}
