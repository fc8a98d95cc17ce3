//! Networks of other crates, behind one type.
//!
//! burn's `Module` has generic functions, so `dyn Module` is not possible. [`ErasedNetwork`] has the functions that a
//! [`Network`](crate::Network) needs, with `dyn` arguments. A parameter passes through them as `dyn Any`. The receiver finds its
//! number of dimensions by trying one to six.

use std::any::Any;
use std::fmt::Debug;

use burn::module::{Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};

use crate::{BuildError, Context, Init, Spec};

/// A network that a program adds to the registry with [`register`](crate::register).
///
/// `trainer/examples/own_model.rs` is a complete program.
pub trait CustomNetwork: Module + Sync + 'static {
    /// Builds the network for `spec` with initial weights from `init`. Pass `init.child(name)` to each module, with the name of
    /// the module's field: then equal seeds result in equal weights everywhere.
    ///
    /// # Errors
    ///
    /// [`BuildError::ImageTooSmall`], for example by [`Spec::require_side`].
    fn build(spec: &Spec, init: &Init) -> Result<Self, BuildError>;

    /// Maps normalised images `[B, C, H, W]` to logits `[B, classes]`. The layers of [`layers`](crate::layers) take the context.
    /// An export to ONNX needs the operations between the layers to be those of the crate `ops`.
    fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2>;

    /// Returns the smallest batch that the network can be trained on: 2 if a batch norm sees one pixel per image.
    fn smallest_batch(&self, _image_size: [usize; 2]) -> usize {
        1
    }
}

/// Any [`CustomNetwork`], as a module.
#[derive(Debug)]
pub struct CustomModule(Box<dyn ErasedNetwork>);

impl CustomModule {
    pub(crate) fn new(network: impl CustomNetwork) -> Self {
        Self(Box::new(network))
    }

    pub(crate) fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        self.0.forward(images, cx)
    }

    pub(crate) fn smallest_batch(&self, image_size: [usize; 2]) -> usize {
        self.0.smallest_batch(image_size)
    }
}

/// [`CustomNetwork`] and burn's `Module` without generic functions.
trait ErasedNetwork: Debug + Send + Sync {
    fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2>;
    fn smallest_batch(&self, image_size: [usize; 2]) -> usize;
    fn boxed_clone(&self) -> Box<dyn ErasedNetwork>;
    fn visit(&self, visitor: &mut dyn ErasedVisitor);
    fn map(self: Box<Self>, mapper: &mut dyn ErasedMapper) -> Box<dyn ErasedNetwork>;
    fn to_device(self: Box<Self>, device: &Device) -> Box<dyn ErasedNetwork>;
    fn fork(self: Box<Self>, device: &Device) -> Box<dyn ErasedNetwork>;
    fn collect_devices(&self, devices: Devices) -> Devices;
    fn materialize(self: Box<Self>) -> Box<dyn ErasedNetwork>;
    fn valid(&self) -> Box<dyn ErasedNetwork>;
    fn train(self: Box<Self>) -> Box<dyn ErasedNetwork>;
}

impl<N: CustomNetwork> ErasedNetwork for N {
    fn forward(&self, images: Tensor<4>, cx: &Context) -> Tensor<2> {
        CustomNetwork::forward(self, images, cx)
    }

    fn smallest_batch(&self, image_size: [usize; 2]) -> usize {
        CustomNetwork::smallest_batch(self, image_size)
    }

    fn boxed_clone(&self) -> Box<dyn ErasedNetwork> {
        Box::new(self.clone())
    }

    fn visit(&self, visitor: &mut dyn ErasedVisitor) {
        Module::visit(self, &mut VisitorOf(visitor));
    }

    fn map(self: Box<Self>, mapper: &mut dyn ErasedMapper) -> Box<dyn ErasedNetwork> {
        Box::new(Module::map(*self, &mut MapperOf(mapper)))
    }

    fn to_device(self: Box<Self>, device: &Device) -> Box<dyn ErasedNetwork> {
        Box::new(Module::to_device(*self, device))
    }

    fn fork(self: Box<Self>, device: &Device) -> Box<dyn ErasedNetwork> {
        Box::new(Module::fork(*self, device))
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        Module::collect_devices(self, devices)
    }

    fn materialize(self: Box<Self>) -> Box<dyn ErasedNetwork> {
        Box::new(Module::materialize(*self))
    }

    fn valid(&self) -> Box<dyn ErasedNetwork> {
        Box::new(Module::valid(self))
    }

    fn train(self: Box<Self>) -> Box<dyn ErasedNetwork> {
        Box::new(Module::train(*self))
    }
}

impl Clone for CustomModule {
    fn clone(&self) -> Self {
        Self(self.0.boxed_clone())
    }
}

impl Module for CustomModule {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.0.visit(visitor);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        Self(self.0.map(mapper))
    }

    fn to_device(self, device: &Device) -> Self {
        Self(self.0.to_device(device))
    }

    fn fork(self, device: &Device) -> Self {
        Self(self.0.fork(device))
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.0.collect_devices(devices)
    }

    fn materialize(self) -> Self {
        Self(self.0.materialize())
    }

    fn valid(&self) -> Self {
        Self(self.0.valid())
    }

    fn train(self) -> Self {
        Self(self.0.train())
    }
}

impl ModuleDisplayDefault for CustomModule {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(&format!("{:?}", self.0)).optional()
    }
}

impl ModuleDisplay for CustomModule {}

/// A visitor of float parameters. A parameter is a `Param<Tensor<D>>`.
trait ErasedVisitor {
    fn enter(&mut self, name: &str, container: &str);
    fn exit(&mut self, name: &str, container: &str);
    fn float(&mut self, param: &dyn Any);
}

/// A mapper of float parameters. A parameter is a `Param<Tensor<D>>`, and so is the result.
trait ErasedMapper {
    fn enter(&mut self, name: &str, container: &str);
    fn exit(&mut self, name: &str, container: &str);
    fn float(&mut self, param: Box<dyn Any>) -> Box<dyn Any>;
}

impl<V: ModuleVisitor> ErasedVisitor for V {
    fn enter(&mut self, name: &str, container: &str) {
        self.enter_module(name, container);
    }

    fn exit(&mut self, name: &str, container: &str) {
        self.exit_module(name, container);
    }

    fn float(&mut self, param: &dyn Any) {
        macro_rules! of_rank {
            ($($rank:literal)*) => {
                $(if let Some(param) = param.downcast_ref::<Param<Tensor<$rank>>>() {
                    return self.visit_float(param);
                })*
            };
        }
        of_rank!(1 2 3 4 5 6);
        unreachable!("{RANKS}");
    }
}

impl<M: ModuleMapper> ErasedMapper for M {
    fn enter(&mut self, name: &str, container: &str) {
        self.enter_module(name, container);
    }

    fn exit(&mut self, name: &str, container: &str) {
        self.exit_module(name, container);
    }

    fn float(&mut self, param: Box<dyn Any>) -> Box<dyn Any> {
        macro_rules! of_rank {
            ($param:ident, $($rank:literal)*) => {
                $(let $param = match $param.downcast::<Param<Tensor<$rank>>>() {
                    Ok(param) => return Box::new(self.map_float(*param)),
                    Err(param) => param,
                };)*
            };
        }
        of_rank!(param, 1 2 3 4 5 6);
        unreachable!("{RANKS}: {:?}", (*param).type_id());
    }
}

const RANKS: &str = "a parameter of a custom network has one to six dimensions";

/// Passes the calls of burn's generic visitor on to an [`ErasedVisitor`].
struct VisitorOf<'a>(&'a mut dyn ErasedVisitor);

impl ModuleVisitor for VisitorOf<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0.enter(name, container_type);
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.0.exit(name, container_type);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.float(param);
    }
}

/// Passes the calls of burn's generic mapper on to an [`ErasedMapper`].
struct MapperOf<'a>(&'a mut dyn ErasedMapper);

impl ModuleMapper for MapperOf<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0.enter(name, container_type);
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.0.exit(name, container_type);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        *self.0.float(Box::new(param)).downcast().expect("a mapper keeps a parameter's rank")
    }
}
