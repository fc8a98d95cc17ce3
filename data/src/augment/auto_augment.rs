//! The policies of AutoAugment (Cubuk et al.: "AutoAugment: learning augmentation strategies from data", 2019), as torchvision's
//! `AutoAugment` applies them.

use std::str::FromStr;

use super::operations::Operation;
use super::policy::{self, OperationKind};
use super::random::CounterRng;
use crate::ImageShape;

/// Number of strengths of an operation.
const BINS: usize = 10;

/// The data set for which a policy was learned (torchvision: `AutoAugmentPolicy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AutoAugmentPolicy {
    /// For ImageNet. torchvision's default.
    #[default]
    ImageNet,
    /// For CIFAR-10.
    Cifar10,
    /// For SVHN.
    Svhn,
}

impl AutoAugmentPolicy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::ImageNet, Self::Cifar10, Self::Svhn];

    /// Returns the policy's name in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::ImageNet => "imagenet",
            Self::Cifar10 => "cifar10",
            Self::Svhn => "svhn",
        }
    }

    fn sub_policies(self) -> &'static [SubPolicy] {
        match self {
            Self::ImageNet => &IMAGENET,
            Self::Cifar10 => &CIFAR10,
            Self::Svhn => &SVHN,
        }
    }
}

impl FromStr for AutoAugmentPolicy {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|policy| policy.name() == text).ok_or(())
    }
}

/// Two operations in order: kind, probability, and strength from 0 to `BINS - 1` (0 for an operation without strength).
type SubPolicy = [(OperationKind, f64, usize); 2];

/// Draws a sub-policy, and then its operations with their probabilities. Strengths are negative with probability 1/2.
pub(super) fn auto_augment(stream: &CounterRng, policy: AutoAugmentPolicy, shape: ImageShape) -> Vec<Operation> {
    let sub_policies = policy.sub_policies();
    let sub_policy = sub_policies[stream.below(0, sub_policies.len() as u32) as usize];
    let ranges = policy::rand_ranges(shape);
    let drawn = (1..).step_by(2).zip(sub_policy).filter_map(|(counter, (kind, probability, bin))| {
        let negative = stream.below(counter + 1, 2) == 1;
        (stream.unit(counter) < probability).then(|| policy::operation(kind, (bin, BINS), negative, &ranges)).flatten()
    });
    drawn.collect()
}

/// The sub-policies for ImageNet.
const IMAGENET: [SubPolicy; 25] = {
    use OperationKind::*;
    [
        [(Posterize, 0.4, 8), (Rotate, 0.6, 9)],
        [(Solarize, 0.6, 5), (AutoContrast, 0.6, 0)],
        [(Equalize, 0.8, 0), (Equalize, 0.6, 0)],
        [(Posterize, 0.6, 7), (Posterize, 0.6, 6)],
        [(Equalize, 0.4, 0), (Solarize, 0.2, 4)],
        [(Equalize, 0.4, 0), (Rotate, 0.8, 8)],
        [(Solarize, 0.6, 3), (Equalize, 0.6, 0)],
        [(Posterize, 0.8, 5), (Equalize, 1.0, 0)],
        [(Rotate, 0.2, 3), (Solarize, 0.6, 8)],
        [(Equalize, 0.6, 0), (Posterize, 0.4, 6)],
        [(Rotate, 0.8, 8), (Color, 0.4, 0)],
        [(Rotate, 0.4, 9), (Equalize, 0.6, 0)],
        [(Equalize, 0.0, 0), (Equalize, 0.8, 0)],
        [(Invert, 0.6, 0), (Equalize, 1.0, 0)],
        [(Color, 0.6, 4), (Contrast, 1.0, 8)],
        [(Rotate, 0.8, 8), (Color, 1.0, 2)],
        [(Color, 0.8, 8), (Solarize, 0.8, 7)],
        [(Sharpness, 0.4, 7), (Invert, 0.6, 0)],
        [(ShearX, 0.6, 5), (Equalize, 1.0, 0)],
        [(Color, 0.4, 0), (Equalize, 0.6, 0)],
        [(Equalize, 0.4, 0), (Solarize, 0.2, 4)],
        [(Solarize, 0.6, 5), (AutoContrast, 0.6, 0)],
        [(Invert, 0.6, 0), (Equalize, 1.0, 0)],
        [(Color, 0.6, 4), (Contrast, 1.0, 8)],
        [(Equalize, 0.8, 0), (Equalize, 0.6, 0)],
    ]
};

/// The sub-policies for CIFAR-10.
const CIFAR10: [SubPolicy; 25] = {
    use OperationKind::*;
    [
        [(Invert, 0.1, 0), (Contrast, 0.2, 6)],
        [(Rotate, 0.7, 2), (TranslateX, 0.3, 9)],
        [(Sharpness, 0.8, 1), (Sharpness, 0.9, 3)],
        [(ShearY, 0.5, 8), (TranslateY, 0.7, 9)],
        [(AutoContrast, 0.5, 0), (Equalize, 0.9, 0)],
        [(ShearY, 0.2, 7), (Posterize, 0.3, 7)],
        [(Color, 0.4, 3), (Brightness, 0.6, 7)],
        [(Sharpness, 0.3, 9), (Brightness, 0.7, 9)],
        [(Equalize, 0.6, 0), (Equalize, 0.5, 0)],
        [(Contrast, 0.6, 7), (Sharpness, 0.6, 5)],
        [(Color, 0.7, 7), (TranslateX, 0.5, 8)],
        [(Equalize, 0.3, 0), (AutoContrast, 0.4, 0)],
        [(TranslateY, 0.4, 3), (Sharpness, 0.2, 6)],
        [(Brightness, 0.9, 6), (Color, 0.2, 8)],
        [(Solarize, 0.5, 2), (Invert, 0.0, 0)],
        [(Equalize, 0.2, 0), (AutoContrast, 0.6, 0)],
        [(Equalize, 0.2, 0), (Equalize, 0.6, 0)],
        [(Color, 0.9, 9), (Equalize, 0.6, 0)],
        [(AutoContrast, 0.8, 0), (Solarize, 0.2, 8)],
        [(Brightness, 0.1, 3), (Color, 0.7, 0)],
        [(Solarize, 0.4, 5), (AutoContrast, 0.9, 0)],
        [(TranslateY, 0.9, 9), (TranslateY, 0.7, 9)],
        [(AutoContrast, 0.9, 0), (Solarize, 0.8, 3)],
        [(Equalize, 0.8, 0), (Invert, 0.1, 0)],
        [(TranslateY, 0.7, 9), (AutoContrast, 0.9, 0)],
    ]
};

/// The sub-policies for SVHN.
const SVHN: [SubPolicy; 25] = {
    use OperationKind::*;
    [
        [(ShearX, 0.9, 4), (Invert, 0.2, 0)],
        [(ShearY, 0.9, 8), (Invert, 0.7, 0)],
        [(Equalize, 0.6, 0), (Solarize, 0.6, 6)],
        [(Invert, 0.9, 0), (Equalize, 0.6, 0)],
        [(Equalize, 0.6, 0), (Rotate, 0.9, 3)],
        [(ShearX, 0.9, 4), (AutoContrast, 0.8, 0)],
        [(ShearY, 0.9, 8), (Invert, 0.4, 0)],
        [(ShearY, 0.9, 5), (Solarize, 0.2, 6)],
        [(Invert, 0.9, 0), (AutoContrast, 0.8, 0)],
        [(Equalize, 0.6, 0), (Rotate, 0.9, 3)],
        [(ShearX, 0.9, 4), (Solarize, 0.3, 3)],
        [(ShearY, 0.8, 8), (Invert, 0.7, 0)],
        [(Equalize, 0.9, 0), (TranslateY, 0.6, 6)],
        [(Invert, 0.9, 0), (Equalize, 0.6, 0)],
        [(Contrast, 0.3, 3), (Rotate, 0.8, 4)],
        [(Invert, 0.8, 0), (TranslateY, 0.0, 2)],
        [(ShearY, 0.7, 6), (Solarize, 0.4, 8)],
        [(Invert, 0.6, 0), (Rotate, 0.8, 4)],
        [(ShearY, 0.3, 7), (TranslateX, 0.9, 3)],
        [(ShearX, 0.1, 6), (Invert, 0.6, 0)],
        [(Solarize, 0.7, 2), (TranslateY, 0.6, 7)],
        [(ShearY, 0.8, 4), (Invert, 0.8, 0)],
        [(ShearX, 0.7, 9), (TranslateY, 0.8, 3)],
        [(ShearY, 0.8, 5), (AutoContrast, 0.7, 0)],
        [(ShearX, 0.7, 2), (Invert, 0.1, 0)],
    ]
};

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::policy::tests::strength;
    use super::*;

    fn golden() -> Value {
        serde_json::from_str(include_str!("../../tests/reference/auto_augment.json")).unwrap()
    }

    #[test]
    fn policies_are_torchvisions() {
        for policy in AutoAugmentPolicy::ALL {
            let expected = &golden()["policies"][policy.name()];
            let own: Vec<_> = policy
                .sub_policies()
                .iter()
                .map(|sub_policy| sub_policy.map(|(kind, probability, bin)| (format!("{kind:?}"), probability, bin)))
                .collect();
            assert_eq!(serde_json::to_value(own).unwrap(), *expected, "{}", policy.name());
        }
    }

    #[test]
    fn strengths_are_torchvisions() {
        let ranges = policy::rand_ranges(ImageShape { channels: 3, height: 10, width: 12 });
        let kinds = AutoAugmentPolicy::ALL.into_iter().flat_map(AutoAugmentPolicy::sub_policies).flatten();
        let mut compared = 0;
        for &(kind, _, bin) in kinds {
            let own = strength(policy::operation(kind, (bin, BINS), false, &ranges));
            let expected = golden()["strengths"][format!("{kind:?}")][bin].as_f64().unwrap();
            // Translations are whole pixels.
            let tolerance =
                if matches!(kind, OperationKind::TranslateX | OperationKind::TranslateY) { 1.0 } else { 1e-5 };
            assert!((own - expected).abs() < tolerance, "{kind:?} {bin}: {own}, not {expected}");
            compared += 1;
        }
        assert_eq!(compared, 150);
    }
}
