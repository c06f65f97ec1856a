//! Manual pins (`coracle image pin`). They are stored on disk, because they are not part of the configuration
//! (PIN-9 in CRI 2.33).

use std::collections::BTreeSet;

use coracle_base::error::{Error, Kind};

use super::{Images, View};
use coracle_reference::Reference;

/// Maximum number of manual pins; each is compared with all names of all images.
const MARKS_MAX: usize = 1024;

impl Images {
    /// Pins the image `name`, an ID or a reference; an image that is pulled again under this reference stays
    /// pinned.
    ///
    /// # Errors
    /// Those of [`Images::resolve`]; there are too many pins; an I/O error.
    pub fn pin(&self, name: &str) -> Result<View, Error> {
        let view = self.resolve(name)?;
        let mut marks = self.pinning.marks.borrow().clone();
        if marks.len() >= MARKS_MAX {
            let text = format!("image {name}: there are {MARKS_MAX} pins already");
            return Err(Error::new(Kind::ResourceExhausted, text));
        }
        marks.insert(mark(name, &view));
        self.keep_marks(marks)?;
        self.resolve(name)
    }

    /// Removes manual pins: those with this name, and those with the ID or any name of the image that has
    /// this name.
    ///
    /// # Errors
    /// There is no such pin; the configuration pins the image; an I/O error.
    pub fn unpin(&self, name: &str) -> Result<(), Error> {
        let view = self.find(name)?;
        let names: Vec<String> = match &view {
            Some(view) => {
                view.tags.iter().chain(&view.digests).cloned().chain([view.id.to_string()]).collect()
            }
            None => Reference::parse(name).map(|reference| reference.to_string()).into_iter().collect(),
        };
        let mut marks = self.pinning.marks.borrow().clone();
        let before = marks.len();
        marks.retain(|mark| mark != name && !names.contains(mark));
        if marks.len() == before {
            let text = format!("image {name}: not pinned manually");
            return Err(Error::new(Kind::FailedPrecondition, text));
        }
        self.keep_marks(marks)
    }

    /// Commits the pins, then applies them.
    fn keep_marks(&self, marks: BTreeSet<String>) -> Result<(), Error> {
        self.disk.commit_marks(&marks)?;
        *self.pinning.marks.borrow_mut() = marks;
        Ok(())
    }
}

/// The text of a pin: a reference is stored as a reference, so that it applies to any image with this name
/// later; any other text is replaced by the image ID.
fn mark(name: &str, view: &View) -> String {
    let reference = Reference::parse(name).map(|reference| reference.to_string());
    match reference {
        Ok(reference) if view.tags.contains(&reference) || view.digests.contains(&reference) => reference,
        Ok(_) | Err(_) => view.id.to_string(),
    }
}
