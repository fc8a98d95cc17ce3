//! Launches through cubecl's client, on a stream beside the streams of the model, and the conversion between burn's tensors and
//! cubecl's buffers.
//!
//! Every tensor of a collective is a binding of its launch, so cubecl keeps the tensor's memory until the kernel is done.
//! Bindings alone do not order the streams: a [`SideStream`] orders itself after the calling thread's stream, and a stream of
//! cubecl waits for a [`StreamEvent`].

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use burn::backend::{BackendTensor, DispatchTensor, DispatchTensorKind};
use burn::backend::{Cube, DispatchDevice, StreamId};
use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::attributes::BufferIOAttr;
use cubecl::ir::metadata::Info;
use cubecl::ir::settings::{Dim3, ExecutionMode, KernelSettings};
use cubecl::ir::{AddressType, ElemType, Scope, UIntKind};
use cubecl::prelude::{KernelDefinition, KernelId, KernelMetadata};
use cubecl::server::{Handle, KernelArguments, MetadataBindingInfo};
use cubecl::{CubeCount, CubeKernel, PrecompiledSource};

use super::driver::Context;
use super::layout::THREADS;
use super::sequence::Launch;
use super::side_stream::SideStream;
use super::source::{KernelVariant, SOURCE_COUNTS};
use super::stream_event::StreamEvent;
use crate::error::{CommError, Result};

type CubeDevice = burn::backend::tensor::Device<Cube>;

/// The text of a kernel. cubecl compiles the text at the first launch.
#[derive(Clone)]
struct KernelSource {
    variant: KernelVariant,
    source: Arc<str>,
    /// Checksum of the text. Compiled kernels are cached on disk, so the cache's key must change with the text.
    checksum: u32,
}

impl KernelMetadata for KernelSource {
    fn name(&self) -> &'static str {
        self.variant.kernel.name()
    }

    fn id(&self) -> KernelId {
        KernelId::new::<Self>().info((self.variant, self.checksum)).cube_dim(Dim3::new_1d(THREADS))
    }

    fn address_type(&self) -> ElemType {
        ElemType::UInt(UIntKind::U64)
    }
}

impl CubeKernel for KernelSource {
    /// Returns an empty definition with the number of threads. cubecl reads nothing else of it, since [`source`](Self::source)
    /// has the text.
    fn define(&self) -> KernelDefinition {
        let settings = KernelSettings::new(Dim3::new_1d(THREADS), ExecutionMode::Unchecked, AddressType::U64)
            .cube_dim(Dim3::new_1d(THREADS));
        KernelDefinition { body: Scope::root(settings.clone()), settings, info: Info::default() }
    }

    fn source(&self) -> Option<PrecompiledSource> {
        Some(PrecompiledSource {
            source: self.source.to_string(),
            entrypoint_name: self.variant.kernel.name().into(),
            lang: "cuda",
        })
    }
}

/// A tensor's elements on the device, contiguous.
#[derive(Clone)]
pub(super) struct Elements {
    handle: Handle,
    pub(super) len: usize,
}

/// See the module.
pub(super) struct Launcher {
    client: Client,
    burn: Device,
    device: CubeDevice,
    /// The stream of cubecl on which kernels run, if there is no `side_stream`.
    stream: StreamId,
    side_stream: Option<SideStream>,
    /// Index of the GPU among the GPUs that this process sees.
    pub(super) index: usize,
    /// Kernels that have been launched.
    known: RefCell<HashMap<KernelVariant, KernelSource>>,
}

/// Returns whether tensors on `device` are on an NVIDIA GPU.
pub fn is_cuda(device: &Device) -> bool {
    matches!(device.clone().inner().as_dispatch(), DispatchDevice::Cube(cubecl::Device::Cuda(_)))
}

fn cube(tensor: Tensor<1>) -> Result<CubeTensor> {
    match tensor.into_dispatch().kind {
        DispatchTensorKind::Cube(BackendTensor::Float(tensor)) => Ok(tensor),
        _ => Err(CommError::usage("the GPU's collectives need a tensor that is on a GPU and not tracked by autodiff")),
    }
}

fn tensor_of(tensor: CubeTensor) -> Tensor<1> {
    let kind = DispatchTensorKind::Cube(BackendTensor::Float(tensor));
    Tensor::from_dispatch(DispatchTensor { kind, autodiff: Default::default() })
}

impl Launcher {
    /// Makes a launcher for the GPU `device`.
    pub(super) fn new(device: &Device) -> Result<Self> {
        let tensor = cube(Tensor::zeros([1], device))?;
        let cubecl::Device::Cuda(cuda) = &tensor.device else {
            return Err(CommError::usage(format!("{:?} is not a CUDA device", tensor.device)));
        };
        let index = cuda.index;
        Ok(Self {
            client: tensor.client,
            burn: device.clone(),
            device: tensor.device,
            stream: StreamId::allocate(),
            side_stream: None,
            index,
            known: RefCell::default(),
        })
    }

    /// Launches on a [`SideStream`] from now on.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn with_side_stream(mut self, gpu: &Arc<Context>) -> Result<Self> {
        self.side_stream = Some(SideStream::new(&self.client, gpu)?);
        Ok(self)
    }

    /// Returns the stream beside the calling thread's stream, if launches use one.
    pub(super) fn side_stream(&self) -> Option<&SideStream> {
        self.side_stream.as_ref()
    }

    /// Runs `call`, whose memory and whose operations belong to the stream of the launches. With a [`SideStream`] they belong to
    /// the calling thread's stream.
    fn on_stream<R>(&self, call: impl FnOnce() -> R) -> R {
        if self.side_stream.is_some() { call() } else { self.stream.executes(call) }
    }

    /// Returns the device as burn's type.
    pub(super) fn device(&self) -> &Device {
        &self.burn
    }

    /// Orders the stream's later work after `event`.
    pub(super) fn wait(&self, event: &StreamEvent) {
        self.stream.executes(|| event.wait());
    }

    /// Records an event behind all work of the stream.
    pub(super) fn record(&self) -> StreamEvent {
        self.stream.executes(|| StreamEvent::record(&self.burn))
    }

    /// Returns the tensors' elements as kernels need them. Converts them on the stream if necessary.
    pub(super) fn elements(&self, tensors: Vec<Tensor<1>>) -> Result<Vec<Elements>> {
        self.on_stream(|| grouped(tensors).into_iter().map(|tensor| self.contiguous(tensor)).collect())
    }

    /// Returns a tensor's elements as contiguous f32.
    fn contiguous(&self, tensor: Tensor<1>) -> Result<Elements> {
        let mut tensor = if tensor.dtype() == DType::F32 { tensor } else { tensor.cast(DType::F32) };
        let len = tensor.shape().num_elements();
        let strided = |tensor: &CubeTensor| !tensor.is_contiguous();
        let mut primitive = cube(tensor.clone())?;
        if strided(&primitive) {
            // A concatenation copies, and its result is contiguous.
            tensor = Tensor::cat(vec![tensor], 0);
            primitive = cube(tensor)?;
            if strided(&primitive) {
                return Err(CommError::usage(format!(
                    "a tensor of {len} elements has strides {:?}",
                    primitive.meta.strides()
                )));
            }
        }
        Ok(Elements { handle: primitive.handle, len })
    }

    /// Allocates memory for `len` elements, which kernels of this stream write.
    pub(super) fn allocate(&self, len: usize) -> Elements {
        let handle = self.on_stream(|| self.client.empty(len.max(1) * size_of::<f32>()));
        Elements { handle, len }
    }

    /// Returns elements that kernels write as a tensor. A thread that reads the tensor must first wait for an event that was
    /// recorded after the launches.
    pub(super) fn tensor(&self, elements: Elements) -> Tensor<1> {
        let Elements { handle, len } = elements;
        let (client, device) = (self.client.clone(), self.device.clone());
        tensor_of(CubeTensor::new_contiguous(client, device, [len].into(), handle, DType::F32))
    }

    /// Enqueues a launch on the stream and passes it to the driver. cubecl itself would keep the launch in a queue until there are
    /// many launches or a result is read, while another rank's kernel waits for this one.
    ///
    /// # Errors
    /// The kernel does not compile, or the driver refuses the launch. If the kernel fails later, reading its output fails, and
    /// the other ranks report this rank as missing.
    pub(super) fn launch(&self, launch: &Launch, output: &Elements, sources: &[Elements]) -> Result<()> {
        let variant = launch.variant;
        let known = self.known.borrow().contains_key(&variant);
        let kernel = self
            .known
            .borrow_mut()
            .entry(variant)
            .or_insert_with(|| {
                let source = variant.source();
                KernelSource { variant, checksum: crc32c::crc32c(source.as_bytes()), source: source.into() }
            })
            .clone();
        let bind = |elements: &Elements| elements.handle.clone().binding();
        let mut arguments = KernelArguments::new().with_buffer_io(bind(output), BufferIOAttr::ReadWrite);
        for index in 0..variant.max_sources {
            // Unused parameters get the first tensor again. The kernel does not read them, since its table of ends excludes them.
            let elements = sources.get(index).or(sources.first()).unwrap_or(output);
            arguments = arguments.with_buffer_io(bind(elements), BufferIOAttr::ReadOnly);
        }
        let words = launch.params.words(variant.max_sources);
        let len = words.len();
        // `len` words are static and none dynamic, so cubecl passes all words by value, after the buffers.
        arguments = arguments.with_info(MetadataBindingInfo::new(words, len));
        let count = CubeCount::Static(launch.blocks, 1, 1);
        let enqueue = || self.client.launch(Box::new(kernel), count, arguments);
        match &self.side_stream {
            Some(side_stream) => {
                side_stream.run(sources.iter().chain([output]).map(|elements| &elements.handle), enqueue);
                // The kernel's first launch has compiled it. Later launches need no check, for which the calling thread would wait.
                if known {
                    return Ok(());
                }
            }
            None => self.stream.executes(enqueue),
        }
        // The check is queued after the launch, so it returns after cubecl has passed the launch to the driver.
        let checked = self.client.check([&output.handle]);
        checked.map_err(|e| CommError::system(format!("GPU {}: {}: {e}", self.index, variant.kernel.name())))
    }

    /// Waits until all launches on the stream are done.
    pub(super) fn synchronize(&self) -> Result<()> {
        if let Some(side_stream) = &self.side_stream {
            side_stream.join();
        }
        let done = self.on_stream(|| cubecl::future::block_on(self.client.sync()));
        done.map_err(|e| CommError::system(format!("GPU {}: {e}", self.index)))
    }
}

/// Concatenates the last tensors if there are more than a launch takes.
fn grouped(mut tensors: Vec<Tensor<1>>) -> Vec<Tensor<1>> {
    let most = SOURCE_COUNTS[SOURCE_COUNTS.len() - 1];
    if tensors.len() > most {
        let rest = tensors.split_off(most - 1);
        tensors.push(Tensor::cat(rest, 0));
    }
    tensors
}
