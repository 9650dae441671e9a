//! `longhaul completions`, `man` and `config`: about the program itself.

use clap::CommandFactory;
use clap_mangen::Man;

use crate::args::Args;
use crate::args::admin::{CompletionsArgs, ManArgs};
use crate::config::DEFAULT_FILE;
use crate::exit::Failure;
use crate::out;

pub(crate) fn completions(args: &CompletionsArgs) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "longhaul", &mut script);
    out::raw(&script)
}

pub(crate) fn man(args: &ManArgs) -> Result<(), Failure> {
    let Some(folder) = &args.folder else {
        let mut page = Vec::new();
        Man::new(Args::command()).render(&mut page).map_err(|error| Failure::internal(error.to_string()))?;
        return out::raw(&page);
    };
    let failed = |error: std::io::Error| Failure::usage(format!("cannot write to {}: {error}", folder.display()));
    std::fs::create_dir_all(folder).map_err(failed)?;
    clap_mangen::generate_to(Args::command(), folder).map_err(failed)?;
    out::note(format!("written to {}", folder.display()));
    Ok(())
}

pub(crate) fn config() -> Result<(), Failure> {
    out::raw(DEFAULT_FILE.as_bytes())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use crate::args::Args;

    #[test]
    fn the_arguments_do_not_contradict_each_other() {
        Args::command().debug_assert();
    }

    #[test]
    fn the_document_has_every_command() {
        let document = include_str!("../../../../docs/cli.md");
        for command in Args::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = command.get_name();
            let named = ["`", "` ", " "].iter().any(|end| document.contains(&format!("`{name}{end}")));
            assert!(named, "docs/cli.md does not name {name}");
        }
    }
}
