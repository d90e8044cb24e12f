//! Options of `pagefold bench ksm`.

use super::curve::SETTLE_S;
use super::ksmd::WholeHost;
use super::probe::REACTIONS;
use clap::ValueEnum;
use cli::exit::Stop;
use cli::size::parse_bytes;
use std::path::PathBuf;

/// Arguments of `pagefold bench ksm`.
#[derive(clap::Args)]
#[command(after_help = "\
The same guests are started afresh for ksmd at its highest rate, then for Pagefold in one group, and so on in turns. Both
begin with nothing merged and nothing known. Processor time is that of ksmd, or of Pagefold's service, worker and agents,
as the scheduler counts it. Ratios are ours over theirs, of the same round; medians over the rounds.

  merged        pages saved in the end, as a share of the pages that were equal to another one in that turn
  wall, cpu     until 99% of the share that ksmd has merged in the end
  steady_cpu    of a second, guests idle; ksmd's is scaled down to what it would need if it took as long as Pagefold
                until a new duplicate is merged
  break_p50     first write to a merged page

All settings of KSM are put back, however the bench ends. While ksmd's turn lasts, it merges memory of other programs that
asked for it, too: where there are such, it takes --yes.

Examples:
  pagefold bench ksm                                    four Debian VMs of 512M
  pagefold bench ksm --image synthetic --memory 256M    processes with made-up pages
  pagefold bench ksm --churn --svg churn.svg            pages merged over time while the guests work")]
pub struct Options {
    /// Kind of guests
    #[arg(long, value_enum, default_value = "debian")]
    pub image: Image,
    /// Guests
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..=64))]
    pub guests: u64,
    /// Memory of each guest
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_bytes)]
    pub memory: u64,
    /// Turns of each side
    #[arg(long, value_name = "R", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Seconds of idleness over which the steady state is measured
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub steady: u64,
    /// Seconds without growth after which merging has ended; twice as many while less than 97% is merged
    #[arg(long, value_name = "SECONDS", default_value_t = SETTLE_S, value_parser = clap::value_parser!(u64).range(1..=60))]
    pub settle: u64,
    /// New duplicates that each side is given, to see how soon they are merged
    #[arg(long, value_name = "N", default_value_t = REACTIONS, value_parser = clap::value_parser!(u8).range(1..=25))]
    pub reactions: u8,
    /// Have the guests work, and show what is merged over time, in place of everything else
    #[arg(long)]
    pub churn: bool,
    /// How long they work for each side
    #[arg(long, value_name = "M", default_value_t = 3.0, requires = "churn")]
    pub minutes: f64,
    /// Seconds that guests wait after each of the two halves of a pass over their files; 0: they work flat out
    #[arg(long, value_name = "SECONDS", default_value_t = 45, requires = "churn")]
    pub pause: u16,
    /// Draw the curves of the first round into a file
    #[arg(long, value_name = "FILE", requires = "churn")]
    pub svg: Option<PathBuf>,
    /// Have ksmd map pages of zeros to the kernel's zero page, which it does not do by default: much faster where there are many
    #[arg(long)]
    pub use_zero_pages: bool,
    /// Hold guests' memory in small pages, and not in huge ones as VMMs do: the bench disables these for all that it starts
    #[arg(long)]
    pub small_pages: bool,
    /// Have Pagefold do without its prover, as a service does that is not root's
    #[arg(long)]
    pub no_prover: bool,
    #[command(flatten)]
    pub whole_host: WholeHost,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The kind of guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Image {
    /// VMs with Debian, systemd, MariaDB and Apache
    Debian,
    /// VMs with a kernel and busybox
    Tiny,
    /// Processes with made-up pages, in runs as long as in real guests; it is known how many can be merged
    Synthetic,
}

impl Options {
    /// Checks that the options can be carried out on this host.
    ///
    /// # Errors
    /// An option makes no sense, or the host lacks something; the error says what.
    pub fn check(&self) -> anyhow::Result<()> {
        if !rustix::process::geteuid().is_root() {
            let why = "setting ksmd, and seeing page frames, takes root: run this with sudo";
            return Err(Stop::HostLacks(why.to_owned()).into());
        }
        if self.memory < 8 << 20 {
            return Err(Stop::Usage("--memory gives a guest less than 8M: nothing to measure".to_owned()).into());
        }
        if !(self.minutes > 0.0 && self.minutes <= 24.0 * 60.0) {
            return Err(Stop::Usage("--minutes must be more than 0, and a day at most".to_owned()).into());
        }
        let needed = self.guests * self.memory;
        let available = host::available_bytes()?;
        if needed > available {
            let why = format!(
                "{} guests of {} do not fit: {} are available",
                self.guests,
                cli::bytes(self.memory),
                cli::bytes(available)
            );
            return Err(Stop::HostLacks(why).into());
        }
        Ok(())
    }
}
