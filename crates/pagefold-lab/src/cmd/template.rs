//! `pagefold template create --image`: templates of the lab's images.

use super::lab::{ImageName, Show};
use clap::ValueEnum;
use cli::exit::Stop;
use commands::template::CreateArgs;
use lab::{Accelerator, Cache, Progress, Recipe, Spec};
use start::Source;
use std::time::Duration;

/// Word of the kernel's command line that has the helper started, on the third serial line.
const HELPER: &str = "pagefold.identity=/dev/ttyS2";

/// The machine from which a template of an image is made: QEMU's command line, disk and memory.
pub fn of_image(args: &CreateArgs, image: &str) -> anyhow::Result<Source> {
    let image = ImageName::from_str(image, false)
        .map_err(|_| Stop::Usage(format!("there is no image {image}: tiny and debian are images of VMs")))?;
    let cache = Cache::open(&lab::cache_dir()?)?;
    let spec = Spec {
        memory_bytes: args.memory,
        append: format!("{HELPER} {}", args.append).trim().to_owned(),
        qemu_args: args.qemu_args.clone(),
        ..Spec::new(image.into())
    };
    let show = Show::new();
    let dir = std::env::temp_dir().join(format!("pagefold-recipe-{}", std::process::id()));
    let recipe = Recipe::prepare(&spec, &cache, &dir, &|event: Progress| show.event(&event));
    drop(show);
    let recipe = recipe?;
    let place = |word: &String| {
        word.replace(lab::DIR, start::DIR).replace(lab::NAME, start::NAME).replace(lab::DISK, start::DISK)
    };
    Ok(Source {
        words: recipe.words.iter().map(place).collect(),
        disk: recipe.disk,
        memory_bytes: recipe.memory_bytes,
        sees_cpu: recipe.accelerator == Accelerator::Kvm,
        patience: Duration::from_secs(args.timeout),
        allow_unconfirmed: args.allow_unconfirmed,
    })
}
