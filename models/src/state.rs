//! A network's tensors under PyTorch's names, in PyTorch's order.
//!
//! Names are the paths of the module tree: `layer2.0.shortcut.0.weight`. The variant of an enum adds nothing to a path,
//! the position in a list or tuple adds its number, so the tree spells exactly what `state_dict()` does. The integer
//! `num_batches_tracked` is left out: it has no influence on a batch norm of fixed momentum, and PyTorch's strict
//! `load_state_dict` accepts a plain dictionary without it (a dictionary that carries no version metadata is treated as
//! older than that buffer).

mod load;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use crate::layers::Buffer;

pub use load::{LoadError, Misshapen, load_state_dict};

/// A learnable parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterInfo {
    /// PyTorch's name.
    pub name: String,
    /// PyTorch's shape.
    pub shape: Vec<usize>,
    /// burn's key, under which gradients are found; it survives [`map_parameters`] but not the process.
    pub id: ParamId,
}

impl ParameterInfo {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// True where a dimension is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a tensor of the state is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateKind {
    /// Learnable.
    Parameter,
    /// Running statistics.
    Buffer,
}

/// A tensor of the state on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct StateTensor {
    /// PyTorch's name.
    pub name: String,
    /// Parameter or buffer.
    pub kind: StateKind,
    /// PyTorch's shape.
    pub shape: Vec<usize>,
    /// Elements in row-major order.
    pub values: Vec<f32>,
}

impl StateTensor {
    /// A tensor from a file, where only the name tells buffers from parameters.
    pub fn new(name: impl Into<String>, shape: Vec<usize>, values: Vec<f32>) -> Self {
        let name = name.into();
        let buffer = matches!(name.rsplit('.').next(), Some("running_mean" | "running_var" | "num_batches_tracked"));
        let kind = if buffer { StateKind::Buffer } else { StateKind::Parameter };
        Self { name, kind, shape, values }
    }
}

/// Where a traversal is.
#[derive(Debug, Default)]
struct Path {
    segments: Vec<String>,
    in_buffer: bool,
}

impl Path {
    fn enter(&mut self, name: &str, container: &str) {
        match container {
            Buffer::CONTAINER => self.in_buffer = true,
            _ if container.starts_with("Enum:") => {}
            _ => self.segments.push(name.to_owned()),
        }
    }

    fn exit(&mut self, container: &str) {
        match container {
            Buffer::CONTAINER => self.in_buffer = false,
            _ if container.starts_with("Enum:") => {}
            _ => {
                self.segments.pop();
            }
        }
    }

    fn kind(&self) -> StateKind {
        if self.in_buffer { StateKind::Buffer } else { StateKind::Parameter }
    }

    fn info<const D: usize>(&self, id: ParamId, tensor: &Tensor<D>) -> ParameterInfo {
        ParameterInfo { name: self.segments.join("."), shape: tensor.dims().to_vec(), id }
    }
}

/// See [`visit`].
struct Visitor<F> {
    path: Path,
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
        let count = info.len();
        (self.each)(info, self.path.kind(), tensor.reshape([count]));
    }
}

/// Calls `each` with every tensor of the state, in order, flattened and without autodiff.
pub fn visit<M: Module>(module: &M, each: impl FnMut(ParameterInfo, StateKind, Tensor<1>)) {
    module.visit(&mut Visitor { path: Path::default(), each });
}

/// The learnable parameters in registration order.
pub fn parameters<M: Module>(module: &M) -> Vec<ParameterInfo> {
    let mut parameters = Vec::new();
    visit(module, |info, kind, _| {
        if kind == StateKind::Parameter {
            parameters.push(info);
        }
    });
    parameters
}

/// Copies the whole state to the host, in PyTorch's order: of a batch norm `weight`, `bias`, `running_mean`,
/// `running_var`.
pub fn state_dict<M: Module>(module: &M) -> Vec<StateTensor> {
    let mut state = Vec::new();
    visit(module, |info, kind, tensor| {
        let values = tensor.into_data().try_into_vec_as::<f32>().expect("a float tensor converts to f32");
        state.push(StateTensor { name: info.name, kind, shape: info.shape, values });
    });
    state
}

/// Replaces each tensor by what `each` makes of it.
struct Mapper<F> {
    path: Path,
    buffers: bool,
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
        if self.path.in_buffer && !self.buffers {
            return param;
        }
        replace_value(param, |id, tensor| {
            let (info, shape) = (self.path.info(id, &tensor), tensor.dims());
            (self.each)(&info, self.path.kind(), tensor.reshape([info.len()])).reshape(shape)
        })
    }
}

/// The parameter with what `each` makes of its value, both without autodiff.
fn replace_value<const D: usize>(
    param: Param<Tensor<D>>,
    each: impl FnOnce(ParamId, Tensor<D>) -> Tensor<D>,
) -> Param<Tensor<D>> {
    let (id, tensor, mapper) = param.consume();
    // `None` on a device without autodiff.
    let (checkpointing, require_grad) = (tensor.gradient_checkpointing_strategy(), tensor.is_require_grad());
    let tensor = each(id, tensor.without_autodiff());
    // A fresh leaf: the old one's graph ends here.
    let tensor = match checkpointing {
        Some(strategy) => {
            tensor.autodiff().with_gradient_checkpointing_strategy(strategy).set_require_grad(require_grad)
        }
        None => tensor,
    };
    Param::from_mapped_value(id, tensor, mapper)
}

/// Hands each learnable parameter to `update`, flattened and without autodiff, and takes its new value back: the
/// optimiser's way in.
///
/// Nothing is copied to the host. Names, ids, shapes and whether a parameter requires gradients stay as they are.
///
/// # Panics
///
/// When `update` returns another number of elements than it was given.
pub fn map_parameters<M: Module>(module: M, mut update: impl FnMut(&ParameterInfo, Tensor<1>) -> Tensor<1>) -> M {
    let each = |info: &ParameterInfo, _, tensor| update(info, tensor);
    module.map(&mut Mapper { path: Path::default(), buffers: false, each })
}

/// Takes all parameters out of a module, then puts others in.
struct Exchange {
    path: Path,
    taken: Vec<(ParameterInfo, Tensor<1>)>,
    /// `None` while they are taken out.
    returned: Option<std::vec::IntoIter<(Vec<usize>, Tensor<1>)>>,
}

impl ModuleMapper for Exchange {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.path.exit(container_type);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.path.in_buffer {
            return param;
        }
        replace_value(param, |id, tensor| match &mut self.returned {
            None => {
                // of one element, not of none: no backend minds that
                let (info, empty) = (self.path.info(id, &tensor), Tensor::empty([1; D], &tensor.device()));
                let flat = tensor.reshape([info.len()]);
                self.taken.push((info, flat));
                empty
            }
            Some(values) => {
                let (shape, value) = values.next().expect("a module has as many parameters as were taken out of it");
                value.reshape::<D, _>(burn::tensor::Shape::from(shape))
            }
        })
    }
}

/// [`map_parameters`] for an operation over all of them: `update` gets the learnable parameters in registration order,
/// and gives their new values. Meanwhile nothing else holds their memory, unless the caller keeps a clone of `module`, so
/// that they can be changed in place.
///
/// # Panics
///
/// When `update` returns another number of tensors than it was given, or of elements of one.
pub fn update_parameters<M: Module>(
    module: M,
    update: impl FnOnce(Vec<(ParameterInfo, Tensor<1>)>) -> Vec<Tensor<1>>,
) -> M {
    let mut exchange = Exchange { path: Path::default(), taken: Vec::new(), returned: None };
    let module = module.map(&mut exchange);
    let shapes: Vec<Vec<usize>> = exchange.taken.iter().map(|(info, _)| info.shape.clone()).collect();
    let values = update(exchange.taken);
    assert_eq!(values.len(), shapes.len(), "every parameter gets a new value");
    let returned: Vec<_> = shapes.into_iter().zip(values).collect();
    module.map(&mut Exchange { path: Path::default(), taken: Vec::new(), returned: Some(returned.into_iter()) })
}

/// [`map_parameters`] over parameters and buffers, in the order of [`state_dict`], e.g. for an exponential moving
/// average.
///
/// # Panics
///
/// When `update` returns another number of elements than it was given.
pub fn map_state<M: Module>(module: M, update: impl FnMut(&ParameterInfo, StateKind, Tensor<1>) -> Tensor<1>) -> M {
    module.map(&mut Mapper { path: Path::default(), buffers: true, each: update })
}

/// A parameter's gradient, flattened; `None` where the loss did not depend on it.
///
/// # Panics
///
/// For a rank that no layer has: parameters have one, two or four dimensions.
pub fn gradient(gradients: &GradientsParams, parameter: &ParameterInfo) -> Option<Tensor<1>> {
    let (id, count) = (parameter.id, parameter.len());
    match parameter.shape.len() {
        1 => gradients.get::<1>(id),
        2 => gradients.get::<2>(id).map(|gradient| gradient.reshape([count])),
        4 => gradients.get::<4>(id).map(|gradient| gradient.reshape([count])),
        rank => panic!("`{}` has {rank} dimensions; layers hold parameters of 1, 2 or 4", parameter.name),
    }
}

/// [`gradient`], taken out of `gradients`: its memory is free for reuse once the optimiser is done with it.
///
/// # Panics
///
/// As [`gradient`].
pub fn take_gradient(gradients: &mut GradientsParams, parameter: &ParameterInfo) -> Option<Tensor<1>> {
    let (id, count) = (parameter.id, parameter.len());
    match parameter.shape.len() {
        1 => gradients.remove::<1>(id),
        2 => gradients.remove::<2>(id).map(|gradient| gradient.reshape([count])),
        4 => gradients.remove::<4>(id).map(|gradient| gradient.reshape([count])),
        rank => panic!("`{}` has {rank} dimensions; layers hold parameters of 1, 2 or 4", parameter.name),
    }
}
