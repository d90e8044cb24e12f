//! A build: `make` with GCC, of Lua from Debian's sources.

use super::{USUAL, Workload};
use crate::side::Side;

pub const BUILD: Workload = Workload {
    name: "build",
    unit: "build of Lua by GCC",
    cap: USUAL,
    // Compilers end before any of their memory is left unwritten long enough to be folded.
    floor: 0,
    needs: &[("cc", "gcc"), ("make", "make"), ("apt-get", "apt")],
    recipe: build,
};

/// Script that fetches Debian's source of Lua and unpacks it into `lua`, below the working directory.
const FETCH: &str = include_str!("lua_source.sh");

fn build(side: &Side) -> anyhow::Result<f64> {
    let prepared = side.prepared(|dir| side.aside(&["sh", "-c", &format!("cd {dir}\n{FETCH}")]).map(drop))?;
    let (builds, mut all) = (side.amount(4, 1), 0.0);
    for n in 0..builds {
        let lua = side.path(&format!("lua-{n}"))?;
        side.aside(&["cp", "-a", &format!("{prepared}/lua"), &lua])?;
        all += side.run("make", &["make", "-C", &lua, "-j2", "linux", "MYLIBS=", "SYSLIBS="])?.1;
    }
    Ok(all / builds as f64)
}
