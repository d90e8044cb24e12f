//! Makes clones members of their group from the start: the memory of their template is a segment of the group's pool,
//! so all its pages count as folded.
//!
//! ```text
//!   does the service that serves the group have the template?  -- yes --> its file
//!                                         | no
//!                                         v
//!   memory file of a living clone, or loaded from the directory --> handed to the service, which seals and keeps it
//!   clone's QEMU: started by `pagefold run`, with that file as its standard input
//!   last clone has ended: the service unloads the template
//! ```
//!
//! Every user of the group can load a template into the service. So a file from the service is used only if it is
//! sealed, and is either the file of a recorded clone, or has the template's digest.

use crate::digest;
use crate::memory::{self, SEALS};
use crate::record::Record;
use crate::template::Template;
use anyhow::{Context, bail};
use api::client::Service;
use api::place::{Meant, Place, own_uid};
use api::template::{Question, Reply, ask, file_name};
use host::ForeignFile;
use rustix::fd::AsFd;
use rustix::fs::fcntl_get_seals;
use std::fs::File;
use std::path::Path;

/// A template's name in the pool consists of this many bytes of its name, and its digest.
const NAME_BYTES: usize = 31;

/// The service that folds the clones of a group.
#[derive(Clone, Debug)]
pub struct Folding {
    place: Place,
    group: String,
}

impl Folding {
    /// The service that the caller means, if it serves this group. If none does, says so on the terminal, and returns
    /// `None`.
    ///
    /// # Errors
    /// An option names the service, and that service does not serve the group.
    pub fn find(meant: &Meant, group: &str) -> anyhow::Result<Option<Self>> {
        let mut refused = None;
        let services = match Service::find(meant) {
            Err(why) if matches!(meant, Meant::Named(_)) => return Err(why),
            found => found.unwrap_or_default(),
        };
        // Only services of root and of the caller are used: another user's service would control the memory of the
        // caller's guests.
        let is_ours = |place: &Place| place.owner().is_ok_and(|owner| owner == 0 || owner == own_uid());
        for Service { place, .. } in services.into_iter().filter(|service| is_ours(&service.place)) {
            let folding = Self { place, group: group.to_owned() };
            match folding.ask(&Question::List { group: group.to_owned() }, None) {
                Ok((Reply::Templates(_), _)) => return Ok(Some(folding)),
                Ok((Reply::Refused(why), _)) => refused = Some(why),
                Ok(_) => {}
                Err(why) => refused = Some(why.to_string()),
            }
        }
        let why = refused.map_or_else(String::new, |why| format!(" ({why})"));
        let text = format!("no service serves group {group}{why}");
        if matches!(meant, Meant::Named(_)) {
            bail!("{text}: say --no-fold for clones that are not folded");
        }
        cli::say!(
            "pagefold: {text}: its clones share what they do not write, and nothing is folded; see pagefold serve"
        );
        Ok(None)
    }

    /// The service that folded a recorded clone, if that still serves the group. If not, says so on the terminal, and
    /// returns `None`.
    ///
    /// # Errors
    /// As for [`Self::find`].
    pub fn again(record: &Record) -> anyhow::Result<Option<Self>> {
        let Some(dir) = &record.service else { return Ok(None) };
        Self::find(&Meant::Preset(Place::at(dir)), &record.group)
    }

    /// The service's directory.
    pub fn dir(&self) -> &Path {
        self.place.dir()
    }

    /// The sealed memory file of a template, which the service keeps. The service is given the file if it has none yet.
    /// A file that the service has already is checked: it must be the file of one of the living `clones`, or have the
    /// template's digest.
    pub(crate) fn memory(&self, template: &Template, dir: &Path, clones: &[&Record]) -> anyhow::Result<File> {
        let (group, name) = (self.group.clone(), kept_name(&template.name, &template.memory.digest));
        let load = Question::Load { group, name };
        if let (Reply::Loaded(_), Some(kept)) = self.ask(&load, None)? {
            return self.checked(kept, template, clones);
        }
        let made = match clones.iter().find_map(|clone| memory::borrow(clone)) {
            Some(file) => file,
            None => memory::load(template, dir, &file_name(&self.group))?,
        };
        match self.ask(&load, Some(&made))? {
            (Reply::Loaded(_), Some(kept)) => {
                let is_same = memory::id_of(&made).ok() == memory::id_of(&kept).ok();
                if is_same { Ok(File::from(kept.into_inner())) } else { self.checked(kept, template, clones) }
            }
            (Reply::Refused(why), _) => bail!(
                "the service in {} does not take the template: {why}; pagefold clone --no-fold starts clones that are not folded",
                self.dir().display()
            ),
            _ => bail!("the service in {} answers something else than was asked", self.dir().display()),
        }
    }

    /// A file that the service had already, if its content is the template's.
    fn checked(&self, kept: ForeignFile, template: &Template, clones: &[&Record]) -> anyhow::Result<File> {
        let dir = self.dir().display();
        let wrong = || format!("the service in {dir} has been given something else as template {}", template.name);
        // Only a sealed memory file is read: reading another file may wait for its server, or see it change.
        if !fcntl_get_seals(&kept).is_ok_and(|seals| seals.contains(SEALS)) {
            bail!("{}, and it is not sealed", wrong());
        }
        let file = File::from(kept.into_inner());
        let id = memory::id_of(&file).ok();
        let is_known = clones.iter().any(|clone| clone.memory.is_some() && clone.memory == id);
        if !is_known && digest::read(&file, |_, _| Ok(())).with_context(wrong)?.digest != template.memory.digest {
            bail!("{}: that is let go, try again", wrong());
        }
        Ok(file)
    }

    fn ask(&self, question: &Question, file: Option<&File>) -> anyhow::Result<(Reply, Option<ForeignFile>)> {
        let asked = ask(&self.place, question, file.map(AsFd::as_fd));
        asked.with_context(|| format!("the service in {} does not answer", self.dir().display()))
    }
}

/// The name of a template in its group's pool. A template that was made anew has another name, because its digest
/// differs.
fn kept_name(name: &str, digest: &str) -> String {
    let digest = digest.rsplit(':').next().unwrap_or_default();
    format!("{}-{digest}", &name[..name.len().min(NAME_BYTES)])
}

/// Tells the service of a clone that is gone to unload the template, if no living clone maps it.
pub(crate) fn release(gone: &Record, living: &[Record]) {
    let Some(dir) = &gone.service else { return };
    if living.iter().any(|clone| clone.is_sibling(gone)) {
        return;
    }
    let question = Question::Unload { group: gone.group.clone(), name: kept_name(&gone.template, &gone.digest) };
    // A service that has ended keeps nothing, and one that was killed has forgotten the name.
    let _ = ask(&Place::at(dir), &question, None);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_the_pool_are_valid_and_differ_by_digest() {
        let long = "n".repeat(48);
        let one = kept_name(&long, "xxh3-64:0123456789abcdef");
        assert!(api::name::check("template", &one).is_ok(), "{one}");
        assert_ne!(one, kept_name(&long, "xxh3-64:0123456789abcdee"));
        assert_eq!(kept_name("web", "xxh3-64:0123456789abcdef"), "web-0123456789abcdef");
    }
}
