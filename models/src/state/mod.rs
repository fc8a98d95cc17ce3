//! A network's state dict: its tensors with PyTorch's names, in PyTorch's order.
//!
//! Names are paths in the module tree, e.g. `layer2.0.shortcut.0.weight`. An entry of a list or tuple adds its index to the
//! path, and the variant of an enum adds nothing, so names equal those of PyTorch's `state_dict()`. The integer
//! `num_batches_tracked` is omitted: it does not affect a batch norm with a fixed momentum. PyTorch's strict
//! `load_state_dict` accepts a plain dictionary without it, because a dictionary without version metadata counts as older
//! than that buffer.

mod load;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Gradients, Tensor};

use crate::layers::{BUFFER, FROZEN};

pub use load::{LoadError, ShapeMismatch, load_state_dict};

/// A learnable parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterInfo {
    /// Name in PyTorch's state dict.
    pub name: String,
    /// Shape in PyTorch's layout.
    pub shape: Vec<usize>,
    /// burn's key of the gradient. It survives [`map_parameters`] but not the process.
    pub id: ParamId,
    /// Whether it is the scale or the shift of a batch norm.
    pub of_norm: bool,
}

impl ParameterInfo {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns true if a dimension is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Returns whether the tensor or module `name` is `module` or a part of it, by their paths: `layer1.0.conv1.weight` is within
/// `layer1`, `layer1.0` and itself, and not within `layer`.
pub fn is_within(name: &str, module: &str) -> bool {
    name.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Kind of a tensor in the state dict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateKind {
    /// A learnable parameter.
    Parameter,
    /// A weight that is never trained, or a running statistic of a frozen batch norm. It has no gradient, and a training step
    /// does not change it.
    Frozen,
    /// A buffer: running statistics.
    Buffer,
}

/// A tensor of the state dict, on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct StateTensor {
    /// Name in PyTorch's state dict.
    pub name: String,
    /// Kind of the tensor: parameter, frozen weight or buffer.
    pub kind: StateKind,
    /// Shape in PyTorch's layout.
    pub shape: Vec<usize>,
    /// Elements in row-major order.
    pub values: Vec<f32>,
}

impl StateTensor {
    /// Makes a tensor from a file, where only the name distinguishes buffers from parameters.
    pub fn new(name: impl Into<String>, shape: Vec<usize>, values: Vec<f32>) -> Self {
        let name = name.into();
        let buffer = matches!(name.rsplit('.').next(), Some("running_mean" | "running_var" | "num_batches_tracked"));
        let kind = if buffer { StateKind::Buffer } else { StateKind::Parameter };
        Self { name, kind, shape, values }
    }
}

/// Containers of batch norms in a module traversal: burn's names of the layers' types.
const NORMS: [&str; 2] = ["Struct:BatchNorm2d", "Struct:FixedScaleNorm2d"];

/// Current position of a module traversal.
#[derive(Debug)]
struct ModulePath {
    segments: Vec<String>,
    kind: StateKind,
    in_norm: bool,
}

impl Default for ModulePath {
    fn default() -> Self {
        Self { segments: Vec::new(), kind: StateKind::Parameter, in_norm: false }
    }
}

impl ModulePath {
    fn enter(&mut self, name: &str, container: &str) {
        match container {
            BUFFER => self.kind = StateKind::Buffer,
            FROZEN => self.kind = StateKind::Frozen,
            _ if container.starts_with("Enum:") => {}
            _ => {
                self.segments.push(name.to_owned());
                self.in_norm = NORMS.contains(&container);
            }
        }
    }

    fn exit(&mut self, container: &str) {
        match container {
            BUFFER | FROZEN => self.kind = StateKind::Parameter,
            _ if container.starts_with("Enum:") => {}
            _ => {
                self.segments.pop();
            }
        }
    }

    fn kind(&self) -> StateKind {
        self.kind
    }

    fn info<const D: usize>(&self, id: ParamId, tensor: &Tensor<D>) -> ParameterInfo {
        let (name, shape) = (self.segments.join("."), tensor.dims().to_vec());
        ParameterInfo { name, shape, id, of_norm: self.in_norm }
    }
}

/// See [`visit`].
struct Visitor<F> {
    path: ModulePath,
    each: F,
}

impl<F: FnMut(ParameterInfo, StateKind, Tensor<1>)> ModuleVisitor for Visitor<F> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.path.exit(container_type);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.val().without_autodiff();
        let info = self.path.info(param.id, &tensor);
        (self.each)(info, self.path.kind(), ops::parameter::flatten(tensor));
    }
}

/// Calls `each` with every tensor of the state dict, in order, flattened by [`ops::parameter::flatten`] and without autodiff.
pub fn visit<M: Module>(module: &M, each: impl FnMut(ParameterInfo, StateKind, Tensor<1>)) {
    module.visit(&mut Visitor { path: ModulePath::default(), each });
}

/// Returns the learnable parameters in registration order.
pub fn parameters<M: Module>(module: &M) -> Vec<ParameterInfo> {
    let mut parameters = Vec::new();
    visit(module, |info, kind, _| {
        if kind == StateKind::Parameter {
            parameters.push(info);
        }
    });
    parameters
}

/// Returns the path of the module with the last weights, a network's classifier: `fc`, `classifier.1`.
pub fn head<M: Module>(module: &M) -> String {
    let mut last = String::new();
    visit(module, |info, kind, _| {
        if kind != StateKind::Buffer {
            last = info.name;
        }
    });
    last.rsplit_once('.').map(|(path, _)| path.to_owned()).unwrap_or_default()
}

/// Copies the state dict to the host, in PyTorch's order: a batch norm's `weight`, `bias`, `running_mean` and `running_var`
/// are adjacent.
pub fn state_dict<M: Module>(module: &M) -> Vec<StateTensor> {
    let mut state = Vec::new();
    visit(module, |info, kind, tensor| {
        let values = ops::parameter::to_row_major(tensor, &info.shape)
            .into_data()
            .try_into_vec_as::<f32>()
            .expect("a float tensor converts to f32");
        state.push(StateTensor { name: info.name, kind, shape: info.shape, values });
    });
    state
}

/// Replaces each tensor by the result of `each`.
struct Mapper<F> {
    path: ModulePath,
    /// Whether frozen weights and buffers are replaced too.
    include_buffers: bool,
    each: F,
}

impl<F: FnMut(&ParameterInfo, StateKind, Tensor<1>) -> Tensor<1>> ModuleMapper for Mapper<F> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.path.exit(container_type);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.path.kind() != StateKind::Parameter && !self.include_buffers {
            return param;
        }
        replace_value(param, |id, tensor| {
            let (info, shape) = (self.path.info(id, &tensor), tensor.dims());
            ops::parameter::unflatten((self.each)(&info, self.path.kind(), ops::parameter::flatten(tensor)), shape)
        })
    }
}

/// Replaces a parameter's value by the result of `each`, which gets and returns tensors without autodiff.
fn replace_value<const D: usize>(
    param: Param<Tensor<D>>,
    each: impl FnOnce(ParamId, Tensor<D>) -> Tensor<D>,
) -> Param<Tensor<D>> {
    let (id, tensor, mapper) = param.consume();
    // `None` on a device without autodiff.
    let (checkpointing, require_grad) = (tensor.gradient_checkpointing_strategy(), tensor.is_require_grad());
    let tensor = each(id, tensor.without_autodiff());
    // The new value is a new leaf: it does not keep the old graph alive.
    let tensor = match checkpointing {
        Some(strategy) => {
            tensor.autodiff().with_gradient_checkpointing_strategy(strategy).set_require_grad(require_grad)
        }
        None => tensor,
    };
    Param::from_mapped_value(id, tensor, mapper)
}

/// Replaces each learnable parameter by the result of `update`, which gets the value flattened by [`ops::parameter::flatten`],
/// without autodiff.
///
/// Nothing is copied to the host. Names, ids, shapes and `requires_grad` are kept.
///
/// # Panics
///
/// When `update` returns a tensor of another length.
pub fn map_parameters<M: Module>(module: M, mut update: impl FnMut(&ParameterInfo, Tensor<1>) -> Tensor<1>) -> M {
    let each = |info: &ParameterInfo, _, tensor| update(info, tensor);
    module.map(&mut Mapper { path: ModulePath::default(), include_buffers: false, each })
}

/// Takes all parameters out of a module in a first traversal, and puts new values into it in a second one.
struct ParameterSwap {
    path: ModulePath,
    taken: Vec<(ParameterInfo, Tensor<1>)>,
    /// The new values; `None` in the first traversal.
    returned: Option<std::vec::IntoIter<(Vec<usize>, Tensor<1>)>>,
}

impl ModuleMapper for ParameterSwap {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.path.exit(container_type);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.path.kind() != StateKind::Parameter {
            return param;
        }
        replace_value(param, |id, tensor| match &mut self.returned {
            None => {
                // One element and not zero: not every backend supports empty tensors.
                let (info, empty) = (self.path.info(id, &tensor), Tensor::empty([1; D], &tensor.device()));
                self.taken.push((info, ops::parameter::flatten(tensor)));
                empty
            }
            Some(values) => {
                let (shape, value) = values.next().expect("both traversals visit the same parameters");
                ops::parameter::unflatten(value, shape.try_into().expect("a parameter keeps its number of dimensions"))
            }
        })
    }
}

/// Replaces all learnable parameters by one call of `update`, e.g. an optimizer's step. `update` gets all parameters in
/// registration order, flattened as in [`map_parameters`], and returns their new values.
///
/// During the call the module holds no reference to the parameters' memory, so `update` can write in place, unless the
/// caller keeps a clone of `module`.
///
/// # Panics
///
/// When `update` returns another number of tensors, or a tensor of another length.
pub fn update_parameters<M: Module>(
    module: M,
    update: impl FnOnce(Vec<(ParameterInfo, Tensor<1>)>) -> Vec<Tensor<1>>,
) -> M {
    let mut swap = ParameterSwap { path: ModulePath::default(), taken: Vec::new(), returned: None };
    let module = module.map(&mut swap);
    let shapes: Vec<Vec<usize>> = swap.taken.iter().map(|(info, _)| info.shape.clone()).collect();
    let values = update(swap.taken);
    assert_eq!(values.len(), shapes.len(), "every parameter gets a new value");
    let returned: Vec<_> = shapes.into_iter().zip(values).collect();
    module.map(&mut ParameterSwap {
        path: ModulePath::default(),
        taken: Vec::new(),
        returned: Some(returned.into_iter()),
    })
}

/// Replaces each parameter, frozen weight and buffer by the result of `update`, as [`map_parameters`], in the order of
/// [`state_dict`].
///
/// # Panics
///
/// When `update` returns a tensor of another length.
pub fn map_state<M: Module>(module: M, update: impl FnMut(&ParameterInfo, StateKind, Tensor<1>) -> Tensor<1>) -> M {
    module.map(&mut Mapper { path: ModulePath::default(), include_buffers: true, each: update })
}

/// See [`take_gradients`].
struct GradientTaker<'a> {
    path: ModulePath,
    gradients: &'a mut Gradients,
    taken: Vec<Option<Tensor<1>>>,
}

impl ModuleVisitor for GradientTaker<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.path.exit(container_type);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.path.kind() != StateKind::Parameter {
            return;
        }
        // `grad_remove` panics for a tensor without autodiff.
        let gradient = param.is_require_grad().then(|| param.val().grad_remove(self.gradients)).flatten();
        self.taken.push(gradient.map(ops::parameter::flatten));
    }
}

/// Moves the gradients of the module's parameters out of the result of `backward`, in the order of [`parameters`]. Each is
/// flattened by [`ops::parameter::flatten`]; `None` where the loss does not depend on the parameter, or the parameter is frozen.
pub fn take_gradients<M: Module>(gradients: &mut Gradients, module: &M) -> Vec<Option<Tensor<1>>> {
    let mut taker = GradientTaker { path: ModulePath::default(), gradients, taken: Vec::new() };
    module.visit(&mut taker);
    taker.taken
}
