//! Answers questions about templates of groups: who may load one into a group's pool, and which file may be one
//! (`api::template`).
//!
//! | the kernel's fact | so |
//! |---|---|
//! | nobody can write the file any more, and it keeps its size (seals) | a member that maps it finds the same content for ever |
//! | the file has the name of the group's pool | `audit`, and the check of a process that joins, recognize its mappings |
//! | it is no file of another group's pool or templates | no page frame is mapped by members of two groups |
//!
//! A worker cannot load a template. If a supervisor is killed and only the worker still has a template, the template
//! has no name any more, so it is given to no further member. The slots of a template are never filled again. So a
//! member that falsely claims to map one only adds savings to the report that do not exist.
//!
//! A worker is told of a template before it gets any member that joins later, and keeps the template until no member
//! maps it.

use super::group::Group;
use super::handed::AboutTemplates;
use super::registry::Registry;
use act::Template;
use api::control::Order;
use api::name;
use api::template::{self, Question, Reply};
use cli::note;
use host::ForeignFile;
use page::PoolSlot;
use rustix::fd::{AsFd, AsRawFd};
use std::rc::Rc;

/// Does what a question about templates asks for, if its user may, and answers it.
pub fn answer(registry: &mut Registry, about: AboutTemplates) {
    let AboutTemplates { question, file, asker, uid } = about;
    let (reply, file) = served(registry, &question, file, uid).unwrap_or_else(|why| (Reply::Refused(why), None));
    // An asker that is gone needs no answer.
    let _ = template::answer(&asker, &reply, file.as_ref().map(AsFd::as_fd));
}

type Served = (Reply, Option<Rc<ForeignFile>>);

fn served(registry: &mut Registry, question: &Question, file: Option<ForeignFile>, uid: u32) -> Result<Served, String> {
    let group = question.group();
    name::check("group", group)?;
    let config = registry.groups.get(group).map(|group| group.config.clone()).unwrap_or_default();
    if !registry.may(uid, &config) || [registry.web_uid, registry.history_uid].contains(&Some(uid)) {
        return Err(format!("user {uid} may not deal with templates of group {group}: add it to the group's users"));
    }
    let is_allowed = registry.groups.contains_key(group) || registry.config.groups.is_none();
    if !is_allowed {
        return Err(format!("there is no group {group}"));
    }
    match question {
        Question::List { .. } => {
            let all = registry.groups.get(group).into_iter().flat_map(|group| group.segments.templates());
            Ok((Reply::Templates(all.map(|(name, (info, file))| described(name, *info, file)).collect()), None))
        }
        Question::Unload { name, .. } => {
            let number = registry.group(group).segments.unload(name);
            let number = number.ok_or_else(|| format!("group {group} has no template {name} loaded"))?;
            registry.group(group).unload(number);
            note!("group {group}: user {uid} has template {name} unloaded");
            Ok((Reply::Unloaded, None))
        }
        Question::Load { name, .. } => {
            name::check("template", name)?;
            let loaded = registry.group(group).segments.templates().any(|(known, _)| known == name);
            match file {
                Some(file) if !loaded => load(registry, group, name, &file, uid)?,
                None if !loaded => return Err(format!("group {group} has no template {name} loaded")),
                _ => {}
            }
            let mut all = registry.group(group).segments.templates();
            let (_, (info, file)) = all.find(|(known, _)| known == name).ok_or("it was not kept")?;
            Ok((Reply::Loaded(described(name, *info, file)), Some(Rc::clone(file))))
        }
    }
}

fn described(name: &str, info: api::control::SegmentInfo, file: &ForeignFile) -> template::Template {
    let bytes = Template::bytes_of(file).unwrap_or(0);
    template::Template { name: name.to_owned(), number: info.number, slots: info.slots, bytes }
}

fn load(registry: &mut Registry, group: &str, name: &str, file: &ForeignFile, uid: u32) -> Result<(), String> {
    let told = std::fs::read_link(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())).unwrap_or_default();
    if told.to_str().and_then(guest::pool_name) != Some(group) {
        return Err(format!(
            "the file is no memory file that is called {}: a template is of one group",
            template::file_name(group)
        ));
    }
    let sealed = Template::seal(file).map_err(|e| {
        format!(
            "it cannot be sealed ({e}): it has to be a memory file of whole pages that nobody maps writable any more"
        )
    })?;
    let found = rustix::fs::fstat(file).map_err(|e| e.to_string())?;
    if let Some(info) = registry.group(group).segments.load_again(name, (found.st_dev, found.st_ino)) {
        registry.group(group).loaded(info);
        return Ok(());
    }
    let is_known = |group: &Group| group.segments.has_file(found.st_dev, found.st_ino);
    if registry.groups.values().any(is_known) {
        return Err("the file is a part of a pool already: a template is of one group, under one name".into());
    }
    let group = registry.group(group);
    // Empty pages of the file count, because the kernel allocates them when a member reads or writes there. Templates
    // that are unloaded and still mapped count, too.
    let of_templates = group.segments.iter().filter(|(info, _)| info.number >= PoolSlot::FIRST_TEMPLATE);
    let slots = of_templates.fold(u64::from(sealed.slots), |sum, (info, _)| sum.saturating_add(info.slots.into()));
    let (needed, most) = (page::pages_to_bytes(slots), group.pool_limit().bytes);
    if needed > most {
        return Err(format!(
            "with it, templates of group {} may take {}, and its pool {} in all: raise it (pagefold group set GROUP --pool SIZE)",
            group.name,
            cli::bytes(needed),
            cli::bytes(most)
        ));
    }
    let info = group.segments.load(name, sealed.slots, sealed.file)?;
    group.loaded(info);
    note!("group {}: user {uid} has template {name} loaded: {}", group.name, cli::bytes(sealed.bytes));
    Ok(())
}

impl Group {
    /// Tells the worker of a template that has just been loaded.
    fn loaded(&mut self, info: api::control::SegmentInfo) {
        let file = self.segments.iter().find(|(known, _)| *known == info).map(|(_, file)| Rc::clone(file));
        if let (Some(worker), Some(file)) = (self.worker.as_mut().filter(|worker| worker.heard), file) {
            worker.send(&Order::Load(info), vec![file]);
        }
    }

    /// Tells the worker to drop a template that is not loaded any more. Without a worker, it is dropped at once.
    fn unload(&mut self, number: u8) {
        match self.worker.as_mut() {
            Some(worker) if worker.heard => _ = worker.send(&Order::Unload(number), vec![]),
            Some(_) => {}
            None => self.segments.remove(number),
        }
    }
}
