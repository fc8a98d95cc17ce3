//! Launches of the kernel through burn's GPU runtime.

use std::any::type_name;

use cubecl::ir::metadata::Info;
use cubecl::ir::{AddressType, ElemType, Scope, UIntKind};
use cubecl::prelude::*;
use cubecl::server::{KernelArguments, MetadataBindingInfo};
use cubecl::{CubeKernel, ExecutionMode, PrecompiledSource};

use super::ahead;
use super::source::{ConvKernel, Pass, Sizes};

/// Types whose names identify the passes in profiles.
struct ConvForward;
struct ConvDataGradient;
struct ConvWeightGradient;
struct ConvGradients;

impl KernelMetadata for ConvKernel {
    fn name(&self) -> &'static str {
        match (self.second, self.first.pass) {
            (Some(_), _) => type_name::<ConvGradients>(),
            (None, Pass::Forward) => type_name::<ConvForward>(),
            (None, Pass::DataGradient) => type_name::<ConvDataGradient>(),
            (None, Pass::WeightGradient) => type_name::<ConvWeightGradient>(),
        }
    }

    fn id(&self) -> KernelId {
        let dim = CubeDim::new_1d(self.threads());
        let id = match (self.second, self.first.pass) {
            (Some(_), _) => KernelId::new::<ConvGradients>(),
            (None, Pass::Forward) => KernelId::new::<ConvForward>(),
            (None, Pass::DataGradient) => KernelId::new::<ConvDataGradient>(),
            (None, Pass::WeightGradient) => KernelId::new::<ConvWeightGradient>(),
        };
        // The cache of compiled kernels belongs to one build of the program, so the key need not contain the source.
        id.info(*self).cube_dim(dim.into()).address_type(AddressType::U32)
    }

    fn address_type(&self) -> ElemType {
        UIntKind::U32.into()
    }
}

impl CubeKernel for ConvKernel {
    fn define(&self) -> KernelDefinition {
        let dim = CubeDim::new_1d(self.threads());
        let settings = KernelSettings::new(dim.into(), ExecutionMode::Unchecked, AddressType::U32);
        KernelDefinition { body: Scope::root(settings.clone()), settings, info: Info::default() }
    }

    fn source(&self) -> Option<PrecompiledSource> {
        ahead::wait(self);
        Some(PrecompiledSource {
            source: Self::source(self),
            entrypoint_name: self.entry_point().to_owned(),
            lang: "cuda",
        })
    }
}

/// Adds the products' sizes to a launch's buffers, as the kernel's last parameter.
pub(super) fn with_sizes(buffers: KernelArguments, sizes: &[Sizes]) -> KernelArguments {
    let data: Vec<u64> = bytemuck::pod_collect_to_vec(sizes);
    let length = data.len();
    KernelArguments { info: MetadataBindingInfo { data, dynamic_metadata_offset: length }, ..buffers }
}
