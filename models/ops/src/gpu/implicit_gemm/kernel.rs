//! Launches of the kernel through burn's GPU runtime.

use std::any::type_name;

use cubecl::ir::metadata::Info;
use cubecl::ir::{AddressType, ElemType, Scope, UIntKind};
use cubecl::prelude::*;
use cubecl::server::{KernelArguments, MetadataBindingInfo};
use cubecl::{CubeKernel, ExecutionMode, PrecompiledSource};

use super::source::{ConvKernel, Pass, Sizes};

/// Names of the passes in profiles.
struct ConvForward;
struct ConvDataGradient;
struct ConvWeightGradient;

impl KernelMetadata for ConvKernel {
    fn name(&self) -> &'static str {
        match self.pass {
            Pass::Forward => type_name::<ConvForward>(),
            Pass::DataGradient => type_name::<ConvDataGradient>(),
            Pass::WeightGradient => type_name::<ConvWeightGradient>(),
        }
    }

    fn id(&self) -> KernelId {
        let dim = CubeDim::new_1d(self.tile.threads());
        let id = match self.pass {
            Pass::Forward => KernelId::new::<ConvForward>(),
            Pass::DataGradient => KernelId::new::<ConvDataGradient>(),
            Pass::WeightGradient => KernelId::new::<ConvWeightGradient>(),
        };
        // A compiled kernel is kept for one build of the program, so the source's text needs no part in the key.
        id.info(*self).cube_dim(dim.into()).address_type(AddressType::U32)
    }

    fn address_type(&self) -> ElemType {
        UIntKind::U32.into()
    }
}

impl CubeKernel for ConvKernel {
    fn define(&self) -> KernelDefinition {
        let dim = CubeDim::new_1d(self.tile.threads());
        let settings = KernelSettings::new(dim.into(), ExecutionMode::Unchecked, AddressType::U32);
        KernelDefinition { body: Scope::root(settings.clone()), settings, info: Info::default() }
    }

    fn source(&self) -> Option<PrecompiledSource> {
        Some(PrecompiledSource {
            source: Self::source(self),
            entrypoint_name: self.entry_point().to_owned(),
            lang: "cuda",
        })
    }
}

impl Sizes {
    /// Adds the sizes to a launch's buffers, as the kernel's last parameter.
    pub(super) fn after(self, buffers: KernelArguments) -> KernelArguments {
        let data: Vec<u64> = bytemuck::pod_collect_to_vec(&[self]);
        let length = data.len();
        KernelArguments { info: MetadataBindingInfo { data, dynamic_metadata_offset: length }, ..buffers }
    }
}
