//! Pins that somebody set by hand (`coracle image pin`): kept on disk until they are taken back, as no configuration says
//! them again (PIN-9 in CRI 2.33).

use std::collections::BTreeSet;
use std::path::Path;

use coracle_base::error::{Error, Kind};
use coracle_base::log;
use coracle_base::store::{self, Damage};

use super::reference::Reference;
use super::{Images, View};

/// Their record: names and ids, one a line.
const RECORD: &str = "pins";
const VERSION: u8 = 1;
/// Most of them; each is compared with every name of every image.
const MARKS_MAX: usize = 1024;

/// Loads the marks below `images`. What cannot be read is lost with a word: nothing is unpinned on purpose, but a node must
/// start.
pub(super) fn load(images: &Path) -> BTreeSet<String> {
    match store::load(images, RECORD, store::Kind::Pins) {
        Ok(loaded) => String::from_utf8_lossy(&loaded.body).lines().map(str::to_owned).collect(),
        Err(Damage::Absent) => BTreeSet::new(),
        Err(damage) => {
            log::error!("pins set by hand cannot be read: set them again"; reason = damage);
            BTreeSet::new()
        }
    }
}

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
        let body: String = marks.iter().flat_map(|mark| [mark.as_str(), "\n"]).collect();
        store::commit(&self.disk.images(), RECORD, store::Kind::Pins, VERSION, body.as_bytes())
            .map_err(|error| error.context("keep the pins"))?;
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
