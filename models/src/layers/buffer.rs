//! Running statistics: tensors that belong to a module's state but never get a gradient.

use std::sync::{Mutex, PoisonError};

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param, ParamId,
};
use burn::tensor::{Device, Tensor};

/// A one-dimensional tensor that a forward pass may replace, e.g. batch norm's running mean.
///
/// Unlike burn's `RunningState`, whose clones share one value, a clone is an independent copy: the inference copy, an
/// EMA copy and the replicas of data parallelism must not see each other's updates. The tensor is always kept without
/// autodiff, whatever device the network trains on, so that statistics never hold on to a graph.
#[derive(Debug)]
pub struct Buffer {
    id: ParamId,
    value: Mutex<Tensor<1>>,
}

impl Buffer {
    /// Container name under which a traversal announces a buffer; it tells buffers from parameters and adds nothing to
    /// the tensor's name.
    pub const CONTAINER: &'static str = "Buffer";

    /// A buffer that holds `value`.
    pub fn new(value: Tensor<1>) -> Self {
        Self::with_id(ParamId::new(), value)
    }

    fn with_id(id: ParamId, value: Tensor<1>) -> Self {
        Self { id, value: Mutex::new(value.without_autodiff()) }
    }

    /// The current value, without autodiff.
    pub fn value(&self) -> Tensor<1> {
        // A poisoned lock still holds a whole tensor: values are only ever replaced, never changed in place.
        self.value.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the value.
    pub fn set(&self, value: Tensor<1>) {
        *self.value.lock().unwrap_or_else(PoisonError::into_inner) = value.without_autodiff();
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        Self::with_id(self.id, self.value())
    }
}

impl Module for Buffer {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.enter_module("", Self::CONTAINER);
        visitor.visit_float(&Param::initialized(self.id, self.value()));
        visitor.exit_module("", Self::CONTAINER);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        mapper.enter_module("", Self::CONTAINER);
        let (id, value, _) = mapper.map_float(Param::initialized(self.id, self.value())).consume();
        mapper.exit_module("", Self::CONTAINER);
        Self::with_id(id, value)
    }

    fn to_device(self, device: &Device) -> Self {
        let value = self.value().to_device(device);
        Self::with_id(self.id, value)
    }

    fn fork(self, device: &Device) -> Self {
        self.to_device(device)
    }

    fn collect_devices(&self, mut devices: Devices) -> Devices {
        let device = self.value().device();
        if !devices.contains(&device) {
            devices.push(device);
        }
        devices
    }

    fn materialize(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn train(self) -> Self {
        self
    }
}

impl ModuleDisplayDefault for Buffer {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(&format!("Buffer {{shape: {:?}}}", self.value().dims())).optional()
    }
}

impl ModuleDisplay for Buffer {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_is_independent() {
        let device = Device::flex();
        let buffer = Buffer::new(Tensor::from_floats([1.0, 2.0], &device));
        let (clone, valid) = (buffer.clone(), buffer.valid());
        buffer.set(Tensor::from_floats([3.0, 4.0], &device));

        let values = |b: &Buffer| b.value().into_data().try_into_vec::<f32>().unwrap();
        assert_eq!(values(&buffer), [3.0, 4.0]);
        assert_eq!(values(&clone), [1.0, 2.0]);
        assert_eq!(values(&valid), [1.0, 2.0]);
    }

    #[test]
    fn autodiff_never_gets_in() {
        let device = Device::flex().autodiff();
        let tracked = Tensor::<1>::from_floats([1.0], &device).require_grad();
        let buffer = Buffer::new(tracked.clone());
        assert!(!buffer.value().is_autodiff());
        buffer.set(tracked * 2.0);
        assert!(!buffer.value().is_autodiff());
        assert!(!buffer.train().value().is_autodiff());
    }
}
