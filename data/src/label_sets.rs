//! The classes of each image where an image may have several (multi-label data sets).

/// The classes of `N` images: any number for each image, also none. The classes of an image are in ascending order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LabelSets {
    /// The classes of all images, one image after the other.
    classes: Vec<u16>,
    /// The end of each image's classes in `classes`, `[N]`.
    ends: Vec<usize>,
}

impl LabelSets {
    /// Returns the number of images.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns true when there is no image.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the classes of image `index`.
    ///
    /// # Panics
    /// If there is no image `index`.
    pub fn of(&self, index: usize) -> &[u16] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.classes[start..self.ends[index]]
    }

    /// Returns the classes of each image, `[N]`.
    pub fn iter(&self) -> impl Iterator<Item = &[u16]> {
        (0..self.len()).map(|index| self.of(index))
    }

    /// Adds an image with `classes`, which are in ascending order.
    pub fn push(&mut self, classes: &[u16]) {
        self.classes.extend_from_slice(classes);
        self.ends.push(self.classes.len());
    }

    /// Keeps the first `count` images.
    pub(crate) fn truncate(&mut self, count: usize) {
        self.ends.truncate(count);
        self.classes.truncate(self.ends.last().copied().unwrap_or(0));
    }

    /// Returns the images `ids`, in their order.
    pub(crate) fn select(&self, ids: &[u32]) -> Self {
        ids.iter().map(|&id| self.of(id as usize)).collect()
    }
}

impl<'a> FromIterator<&'a [u16]> for LabelSets {
    fn from_iter<I: IntoIterator<Item = &'a [u16]>>(images: I) -> Self {
        let mut sets = Self::default();
        images.into_iter().for_each(|classes| sets.push(classes));
        sets
    }
}

/// Returns the first of `classes` classes that no image of `labels` has.
pub(crate) fn first_missing_class<'a>(classes: usize, labels: impl IntoIterator<Item = &'a u16>) -> Option<usize> {
    let mut found = vec![false; classes];
    labels.into_iter().for_each(|&class| found[usize::from(class)] = true);
    found.iter().position(|found| !found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_class_without_images_is_missing() {
        assert_eq!(first_missing_class(4, &[2, 0, 2]), Some(1));
        assert_eq!(first_missing_class(3, &[2, 0, 1]), None);
        assert_eq!(first_missing_class(0, &[]), None);
    }

    #[test]
    fn images_have_their_own_classes() {
        let all: [&[u16]; 4] = [&[1, 4], &[], &[0], &[]];
        let mut sets: LabelSets = all.into_iter().collect();
        assert_eq!(sets.iter().collect::<Vec<_>>(), all);
        assert_eq!(sets.select(&[2, 0, 1]).iter().collect::<Vec<_>>(), [all[2], all[0], all[1]]);
        sets.truncate(2);
        assert_eq!(sets, all[..2].iter().copied().collect());
        sets.push(&[7]);
        assert_eq!((sets.len(), sets.of(2)), (3, &[7][..]));
        sets.truncate(0);
        assert_eq!(sets, LabelSets::default());
    }
}
