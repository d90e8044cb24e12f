//! The directory of templates: `DIR/GROUP/NAME/`, each with `template.json`, `memory`, `device` and perhaps `disk`.
//!
//! A template is made in `.NAME.making`, under the lock of its group, and renamed when it is complete. If `create` is
//! interrupted, that directory stays, and the next `create` removes it. A template that is to be removed when its
//! clones have ended has a file `unwanted`: no further clone is made of it.

use crate::clones::Clones;
use crate::names;
use crate::place::{lock, private_dir, remove_dir, try_lock};
use crate::record::Record;
use crate::template::Template;
use anyhow::Context;
use cli::exit::Stop;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Name of the file that marks a template which is to be removed when its clones have ended.
const UNWANTED: &str = "unwanted";
/// End of the names of templates that are being made.
const MAKING: &str = ".making";

/// The directory of templates.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
}

impl Store {
    /// The store in this directory, which need not be there.
    pub fn open(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// The directory of a template.
    pub fn dir_of(&self, group: &str, name: &str) -> PathBuf {
        self.dir.join(group).join(name)
    }

    /// All templates that can be read, by group and name.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> anyhow::Result<Vec<Template>> {
        let mut found = Vec::new();
        for group in entries(&self.dir)? {
            for dir in entries(&group)? {
                match Template::read(&dir) {
                    Ok(template) => found.push(template),
                    Err(why) => cli::say!("pagefold: {why:#}"),
                }
            }
        }
        found.sort_by(|a, b| (&a.group, &a.name).cmp(&(&b.group, &b.name)));
        Ok(found)
    }

    /// The template of this name in a group.
    ///
    /// # Errors
    /// There is none, it is another group's, or it cannot be read.
    pub fn find(&self, group: &str, name: &str) -> anyhow::Result<(Template, PathBuf)> {
        names::check("template", name)?;
        let dir = self.dir_of(group, name);
        if dir.is_dir() {
            return Ok((Template::read(&dir)?, dir));
        }
        let others = self.list()?.into_iter().filter(|template| template.name == name);
        let others: Vec<String> = others.map(|template| template.group).collect();
        if others.is_empty() {
            return Err(Stop::Usage(format!("no template {name}: pagefold template list shows those there are")).into());
        }
        let text = format!("template {name} is of group {}, and a group's pages are its own", others.join(", "));
        Err(Stop::Usage(format!(
            "{text}: make one for group {group} (pagefold template create {name} --group {group})"
        ))
        .into())
    }

    /// The only template of this name, in any group.
    ///
    /// # Errors
    /// There is none, or several groups have one.
    pub fn find_any(&self, name: &str) -> anyhow::Result<(Template, PathBuf)> {
        let all = self.list()?.into_iter().filter(|template| template.name == name).collect::<Vec<_>>();
        match &all[..] {
            [one] => Ok((one.clone(), self.dir_of(&one.group, name))),
            [] => Err(Stop::Usage(format!("no template {name}: pagefold template list shows those there are")).into()),
            more => {
                let groups: Vec<&str> = more.iter().map(|template| template.group.as_str()).collect();
                Err(Stop::Usage(format!("groups {} have a template {name}: say --group", groups.join(", "))).into())
            }
        }
    }

    /// Makes a template: `fill` writes its parts into a directory.
    pub(crate) fn make(
        &self,
        group: &str,
        name: &str,
        fill: impl FnOnce(&Path) -> anyhow::Result<Template>,
    ) -> anyhow::Result<Template> {
        names::check("template", name)?;
        names::check("group", group)?;
        let parent = self.dir.join(group);
        private_dir(&self.dir)?;
        private_dir(&parent)?;
        let _lock = lock(&parent)?;
        let dir = parent.join(name);
        if dir.exists() {
            let text = format!("group {group} has a template {name} already");
            return Err(Stop::Usage(format!("{text}: pagefold template remove {name} --group {group}")).into());
        }
        remove_unfinished(&parent)?;
        let making = parent.join(format!(".{name}{MAKING}"));
        private_dir(&making)?;
        let made = fill(&making).and_then(|template| {
            fs::rename(&making, &dir).with_context(|| format!("cannot rename {}", making.display()))?;
            File::open(&parent).and_then(|parent| parent.sync_all()).context("cannot write a directory")?;
            Ok(template)
        });
        if made.is_err() {
            remove_dir(&making)?;
        }
        made
    }

    /// Removes a template, and returns true. If clones of it live and `when_unused` is set, it is only marked, to be
    /// removed after them, and false is returned.
    ///
    /// # Errors
    /// Clones of it live and `when_unused` is not set, or it cannot be removed.
    pub fn remove(&self, template: &Template, clones: &Clones, when_unused: bool) -> anyhow::Result<bool> {
        let dir = self.dir_of(&template.group, &template.name);
        let _lock = lock(&self.dir.join(&template.group))?;
        let living: Vec<String> = clones.of(template)?.into_iter().map(|clone| clone.name).collect();
        if living.is_empty() {
            remove_dir(&dir)?;
            return Ok(true);
        }
        if !when_unused {
            let text = format!("{} clones of it live ({})", living.len(), first_of(&living));
            let way = "end them (pagefold clones end NAME), or say --when-unused";
            return Err(Stop::Usage(format!("template {} stays: {text}: {way}", template.name)).into());
        }
        let mark = dir.join(UNWANTED);
        File::create(&mark).with_context(|| format!("cannot create {}", mark.display()))?;
        Ok(false)
    }

    /// Removes unfinished templates of interrupted commands, and marked templates that have no clones any more.
    ///
    /// # Errors
    /// One cannot be removed.
    pub fn tidy(&self, clones: &[Record]) -> anyhow::Result<()> {
        for group in entries(&self.dir)? {
            // The lock is taken while a template is made.
            try_lock(&group).map_or(Ok(()), |_lock| remove_unfinished(&group))?;
        }
        for template in self.list()? {
            let dir = self.dir_of(&template.group, &template.name);
            if is_unwanted(&dir) && !clones.iter().any(|clone| clone.is_of(&template)) {
                let _lock = lock(&self.dir.join(&template.group))?;
                remove_dir(&dir)?;
            }
        }
        Ok(())
    }
}

/// Removes unfinished templates of a group, and ends their machines. The caller holds the group's lock.
fn remove_unfinished(group: &Path) -> anyhow::Result<()> {
    for dir in all_entries(group)?.into_iter().filter(|dir| dir.to_string_lossy().ends_with(MAKING)) {
        crate::vmm::end_those_of(&dir);
        remove_dir(&dir)?;
    }
    Ok(())
}

/// Whether a template is marked to be removed when its clones have ended.
pub(crate) fn is_unwanted(dir: &Path) -> bool {
    dir.join(UNWANTED).exists()
}

/// The first five of some names, as one text.
fn first_of(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let mut text = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text.push_str(", ...");
    }
    text
}

/// Directories in a directory, without hidden ones; none if it is not there.
pub(crate) fn entries(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let is_hidden = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    Ok(all_entries(dir)?.into_iter().filter(|path| !is_hidden(path)).collect())
}

fn all_entries(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let listed = match fs::read_dir(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        listed => listed.with_context(|| format!("cannot list {}", dir.display()))?,
    };
    Ok(listed.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect())
}
