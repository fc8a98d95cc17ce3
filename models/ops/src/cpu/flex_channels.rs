//! Operations on channels for burn-flex.

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::element::with_element;
use super::tensor::{Dense, image, row_major};
use super::{channels, concat};
use crate::channels::{ChannelKernels, Join, impl_channels_without_autodiff};

impl ChannelKernels for Flex {
    fn scale_channels_forward(input: FlexTensor, factors: FlexTensor) -> FlexTensor {
        let (input, factors) = (Dense::channels_last(input), Dense::row_major(factors));
        with_element!(input.dtype(), E => {
            input.like(channels::scale::<E>(input.values(), factors.values(), input.dims4()))
        })
    }

    fn scale_channels_backward(input: FlexTensor, factors: FlexTensor, grad: FlexTensor) -> [FlexTensor; 2] {
        let (input, grad) = (Dense::channels_last(input), Dense::channels_last(grad));
        let factors = Dense::row_major(factors);
        let dims = input.dims4();
        with_element!(input.dtype(), E => {
            let [dx, dfactors] = channels::scale_grad::<E>(input.values(), factors.values(), grad.values(), dims);
            [input.like(dx), row_major(dfactors, [dims[0], dims[1]])]
        })
    }

    fn join_forward(left: FlexTensor, right: FlexTensor, join: Join) -> FlexTensor {
        let (left, right) = (Dense::channels_last(left), Dense::channels_last(right));
        let ([batch, old, height, width], new) = (left.dims4(), right.dims4()[1]);
        let dims = [batch, old + new - join.shared, height, width];
        with_element!(left.dtype(), E => {
            image(concat::joined::<E>(left.values(), right.values(), [old, new], join), dims)
        })
    }

    fn join_backward(
        output: Option<FlexTensor>,
        channels: [usize; 2],
        shared: usize,
        grad: FlexTensor,
    ) -> [FlexTensor; 2] {
        let (output, grad) = (output.map(Dense::channels_last), Dense::channels_last(grad));
        let [batch, _, height, width] = grad.dims4();
        with_element!(grad.dtype(), E => {
            let output = output.as_ref().map_or(&[][..], |output| output.values::<E>());
            let [left, right] = concat::joined_grad::<E>(grad.values(), output, channels, shared);
            let [old, new] = channels.map(|channels| [batch, channels, height, width]);
            [image(left, old), image(right, new)]
        })
    }
}

impl_channels_without_autodiff!(Flex, FlexTensor);
