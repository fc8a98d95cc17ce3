//! Buffers: tensors of a module's state that have no gradient, `torch.nn.Module.register_buffer`, and frozen weights.

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param, ParamId,
};
use burn::tensor::{Device, Tensor};
use parking_lot::Mutex;

/// A tensor that a forward pass may replace, e.g. batch norm's running mean, or a weight that is never trained
/// ([`Buffer::frozen`]).
///
/// A clone is an independent copy, because inference copies and the replicas of data parallelism must not see each other's
/// updates. (Clones of burn's `RunningState` share one value.) The tensor is kept without autodiff on every device, so that
/// statistics never keep a graph alive.
#[derive(Debug)]
pub struct Buffer<const D: usize = 1> {
    id: ParamId,
    container: &'static str,
    /// Boxed: a tensor is several times larger than a reference, and networks are moved by value when they are built and mapped.
    value: Box<Mutex<Option<Tensor<D>>>>,
}

/// Container name of a buffer in a module traversal. It distinguishes buffers from parameters and is not part of the tensor's
/// name.
pub(crate) const BUFFER: &str = "Buffer";
/// Panic message for a buffer without a value.
const TAKEN: &str = "a forward pass that takes a buffer's value sets the new one";
/// Container name of a frozen weight in a module traversal, as [`BUFFER`].
pub(crate) const FROZEN: &str = "Frozen";

impl<const D: usize> Buffer<D> {
    /// Makes a buffer that holds `value`.
    pub fn new(value: Tensor<D>) -> Self {
        Self::from_parts(ParamId::new(), BUFFER, value)
    }

    /// Makes a weight that no forward pass replaces and no optimizer updates, as a parameter with `requires_grad = False`.
    pub fn frozen(value: Tensor<D>) -> Self {
        Self::from_parts(ParamId::new(), FROZEN, value)
    }

    fn from_parts(id: ParamId, container: &'static str, value: Tensor<D>) -> Self {
        Self { id, container, value: Box::new(Mutex::new(Some(value.without_autodiff()))) }
    }

    /// Returns whether no forward pass may replace the value: see [`Buffer::frozen`].
    pub fn is_frozen(&self) -> bool {
        self.container == FROZEN
    }

    /// Returns the current value, without autodiff.
    ///
    /// # Panics
    ///
    /// Between [`Buffer::take`] and [`Buffer::set`].
    pub fn value(&self) -> Tensor<D> {
        self.value.lock().clone().expect(TAKEN)
    }

    /// Takes the current value out, so that it can be changed in place. [`Buffer::set`] puts the new one in.
    ///
    /// # Panics
    ///
    /// When it was taken before.
    pub fn take(&self) -> Tensor<D> {
        self.value.lock().take().expect(TAKEN)
    }

    /// Replaces the value.
    pub fn set(&self, value: Tensor<D>) {
        *self.value.lock() = Some(value.without_autodiff());
    }
}

impl<const D: usize> Clone for Buffer<D> {
    fn clone(&self) -> Self {
        Self::from_parts(self.id, self.container, self.value())
    }
}

impl<const D: usize> Module for Buffer<D> {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.enter_module("", self.container);
        visitor.visit_float(&Param::initialized(self.id, self.value()));
        visitor.exit_module("", self.container);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        mapper.enter_module("", self.container);
        let (id, value, _) = mapper.map_float(Param::initialized(self.id, self.value())).consume();
        mapper.exit_module("", self.container);
        Self::from_parts(id, self.container, value)
    }

    fn to_device(self, device: &Device) -> Self {
        let value = self.value().to_device(device);
        Self::from_parts(self.id, self.container, value)
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

impl<const D: usize> ModuleDisplayDefault for Buffer<D> {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(&format!("{} {{shape: {:?}}}", self.container, self.value().dims())).optional()
    }
}

impl<const D: usize> ModuleDisplay for Buffer<D> {}

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
    fn a_buffer_is_kept_without_autodiff() {
        let device = Device::flex().autodiff();
        let tracked = Tensor::<1>::from_floats([1.0], &device).require_grad();
        let buffer = Buffer::new(tracked.clone());
        assert!(!buffer.value().is_autodiff());
        buffer.set(tracked * 2.0);
        assert!(!buffer.value().is_autodiff());
        assert!(!buffer.train().value().is_autodiff());
    }
}
