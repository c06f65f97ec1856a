//! Pins that somebody set by hand (`coracle image pin`): kept on disk until they are taken back, as no configuration says
//! them again (PIN-9 in CRI 2.33).

use std::collections::BTreeSet;

use coracle_base::error::{Error, Kind};

use super::reference::Reference;
use super::{Images, View};

/// Most of them; each is compared with every name of every image.
const MARKS_MAX: usize = 1024;

impl Images {
    /// Pins the image that `name` means, an id or a reference; one that is pulled again under this reference stays pinned.
    ///
    /// # Errors
    /// As [`Images::resolve`]; too many pins; the disk.
    pub fn pin(&self, name: &str) -> Result<View, Error> {
        let view = self.resolve(name)?;
        let mut marks = self.marks.borrow().clone();
        if marks.len() >= MARKS_MAX {
            let text = format!("image {name}: there are {MARKS_MAX} pins already");
            return Err(Error::new(Kind::ResourceExhausted, text));
        }
        marks.insert(mark(name, &view));
        self.keep_marks(marks)?;
        self.resolve(name)
    }

    /// Takes pins of [`Images::pin`] back: those by this name, and by the id or any name of the image that it means.
    ///
    /// # Errors
    /// There is none; or the configuration pins it, which only the configuration can end; the disk.
    pub fn unpin(&self, name: &str) -> Result<(), Error> {
        let view = self.find(name)?;
        let names: Vec<String> = match &view {
            Some(view) => {
                view.tags.iter().chain(&view.digests).cloned().chain([view.id.to_string()]).collect()
            }
            None => Reference::parse(name).map(|reference| reference.to_string()).into_iter().collect(),
        };
        let mut marks = self.marks.borrow().clone();
        let before = marks.len();
        marks.retain(|mark| mark != name && !names.contains(mark));
        if marks.len() == before {
            let text = format!("image {name}: is not pinned by hand");
            return Err(Error::new(Kind::FailedPrecondition, text));
        }
        self.keep_marks(marks)
    }

    /// Committed first, then seen.
    fn keep_marks(&self, marks: BTreeSet<String>) -> Result<(), Error> {
        self.disk.commit_marks(&marks)?;
        *self.marks.borrow_mut() = marks;
        Ok(())
    }
}

/// A reference stays one, whatever it points to later; anything else becomes the id.
fn mark(name: &str, view: &View) -> String {
    let reference = Reference::parse(name).map(|reference| reference.to_string());
    match reference {
        Ok(reference) if view.tags.contains(&reference) || view.digests.contains(&reference) => reference,
        Ok(_) | Err(_) => view.id.to_string(),
    }
}
