//! The recording of a forward pass: what it connects, and what stays unknown to it.

use burn::tensor::{Device, Tensor};
use ops::trace::{Operation, TensorId, record};
use ops::{Activation, Epilogue, add, avg_pool2d, batch_norm_eval, relu};

fn image(values: [f32; 4]) -> Tensor<4> {
    Tensor::<1>::from_floats(values, &Device::flex()).reshape([1, 1, 2, 2])
}

#[test]
fn a_recording_connects_results_and_operands() {
    let (a, b) = (image([1.0, -2.0, 3.0, -4.0]), image([1.0; 4]));
    let (sum, recording) = record(|| relu(add(a.clone(), b.clone())));
    let [first, second] = &recording.calls[..] else { panic!("{:?}", recording.calls) };
    assert_eq!((&first.operation, &second.operation), (&Operation::Add, &Operation::Activation(Activation::Relu)));
    assert_eq!(first.inputs, [TensorId::of(&a), TensorId::of(&b)]);
    assert_eq!(second.inputs, std::slice::from_ref(&first.output));
    assert_eq!(second.output, TensorId::of(&sum));
    // The operation after a recording is not part of the next one.
    let _ = relu(a);
    assert!(record(|| ()).1.calls.is_empty());
}

#[test]
fn what_an_operation_uses_is_not_recorded() {
    // Average pooling is a convolution on the CPU.
    let (_, recording) = record(|| avg_pool2d(image([1.0; 4]), 2));
    let operations: Vec<_> = recording.calls.iter().map(|call| &call.operation).collect();
    assert_eq!(operations, [&Operation::AvgPool { kernel: 2 }]);
}

#[test]
fn a_fused_sum_and_activation_are_part_of_the_call() {
    let one = || Tensor::<1>::ones([1], &Device::flex());
    let residual = image([5.0; 4]);
    let epilogue = Epilogue { residual: Some(residual.clone()), activation: Activation::Relu6 };
    let input = image([1.0; 4]);
    let (_, recording) =
        record(|| batch_norm_eval(input.clone(), [one(), one()], [one(), one()], 1e-5, epilogue.clone()));
    let [call] = &recording.calls[..] else { panic!("{:?}", recording.calls) };
    assert_eq!(call.operation, Operation::BatchNorm { epsilon: 1e-5 });
    assert_eq!((call.inputs.len(), &call.inputs[0]), (5, &TensorId::of(&input)));
    assert_eq!((&call.residual, call.activation), (&Some(TensorId::of(&residual)), Activation::Relu6));
}

#[test]
fn the_result_of_another_operation_is_unknown() {
    // burn computes the second operand: once in new memory, once as another view of the same memory, once in place if it could.
    let operations: [fn(Tensor<4>) -> Tensor<4>; 3] = [|x| x * 2.0, |x| x.swap_dims(2, 3), |x| x.add_scalar(1.0)];
    for other in operations {
        let (_, recording) = record(|| {
            let x = relu(image([1.0, 2.0, 3.0, 4.0]));
            relu(other(x))
        });
        let [first, second] = &recording.calls[..] else { panic!("{:?}", recording.calls) };
        assert_ne!(second.inputs[0], first.output);
    }
}

#[test]
fn a_panic_ends_the_recording() {
    let ended = std::panic::catch_unwind(|| record(|| panic!("expected by the test")));
    assert!(ended.is_err());
    assert_eq!(record(|| relu(image([1.0; 4]))).1.calls.len(), 1);
}

#[test]
fn a_row_major_tensor_is_known_as_a_vector() {
    let x = image([1.0, 2.0, 3.0, 4.0]);
    assert_eq!(TensorId::of(&x).flat(), Some(TensorId::of(&x.clone().reshape([4]))));
    assert_eq!(TensorId::of(&x.swap_dims(2, 3)).flat(), None);
}
