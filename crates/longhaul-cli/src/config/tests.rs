use std::ffi::OsString;
use std::fs;

use super::*;

/// A working directory and a configuration folder of its own.
struct Bed {
    folder: tempfile::TempDir,
    variables: Vec<(String, OsString)>,
}

impl Bed {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::create_dir_all(folder.path().join("config/longhaul")).expect("made");
        fs::create_dir(folder.path().join("work")).expect("made");
        let variables = vec![
            ("XDG_CONFIG_HOME".to_owned(), folder.path().join("config").into_os_string()),
            ("XDG_DATA_HOME".to_owned(), folder.path().join("data").into_os_string()),
        ];
        Self { folder, variables }
    }

    fn here(self, text: &str) -> Self {
        fs::write(self.folder.path().join("work/longhaul.toml"), text).expect("written");
        self
    }

    fn user(self, text: &str) -> Self {
        fs::write(self.folder.path().join("config/longhaul/longhaul.toml"), text).expect("written");
        self
    }

    fn set(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.into()));
        self
    }

    fn load(&self, flags: Flags) -> Result<Config, Wrong> {
        let environment = |name: &str| self.variables.iter().find(|set| set.0 == name).map(|set| set.1.clone());
        Config::load_in(flags, &environment, &self.folder.path().join("work"))
    }

    fn config(&self) -> Config {
        self.load(Flags::default()).expect("nothing is wrong")
    }

    /// Everything that is wrong, without the folder, which differs.
    fn wrong(&self) -> String {
        let faults = self.load(Flags::default()).expect_err("something is wrong").0;
        let text = faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        text.replace(&format!("{}/", self.folder.path().display()), "")
    }
}

#[test]
fn without_anything_the_defaults_hold() {
    let bed = Bed::new();
    let config = bed.config();
    assert_eq!(config.server.listen.to_string(), "127.0.0.1:7171");
    assert_eq!(config.store.url, format!("sqlite:{}/data/longhaul/longhaul.db", bed.folder.path().display()));
    assert_eq!(config.artifacts.url, Some(format!("{}/data/longhaul/artifacts", bed.folder.path().display())));
    assert_eq!(config.worker.queues, ["default"]);
    assert!(config.rows.iter().all(|row| row.origin == Origin::Default));
    assert!(config.files.is_empty());
    assert_eq!(config.settings().retention, None);
}

#[test]
fn a_flag_is_before_the_environment_which_is_before_the_files_which_are_before_the_default() {
    let bed = Bed::new()
        .here("[worker]\ndrain = \"1m\"\nslots = 3\n")
        .user("[worker]\ndrain = \"2m\"\nlease = \"20s\"\nslots = 4\n");
    let config = bed.config();
    assert_eq!((config.worker.drain.as_secs(), config.worker.lease.as_secs(), config.worker.slots), (60, 20, 3));
    let work = bed.folder.path().join("work/longhaul.toml");
    assert_eq!(*config.origin("worker.drain"), Origin::File { path: work, line: 2 });
    let bed = bed.set("LONGHAUL_DRAIN", "3m").set("LONGHAUL_WORKERS", "");
    let config = bed.config();
    assert_eq!((config.worker.drain.as_secs(), config.worker.slots), (180, 3), "an empty variable is not set");
    assert_eq!(config.origin("worker.drain").to_string(), "LONGHAUL_DRAIN");
    let config = bed.load(Flags::default().set("--drain", "worker.drain", Some("4m"))).expect("right");
    assert_eq!(config.worker.drain.as_secs(), 240);
    assert_eq!(config.origin("worker.drain").to_string(), "--drain");
}

#[test]
fn unknown_keys_are_told_with_file_line_and_the_nearest_key() {
    let bed =
        Bed::new().here("[sever]\nlisten = \"x\"\n[worker]\nslot = 3\ncolour = 1\n[queue.a]\nmax_pendin = 1\n");
    assert_eq!(
        bed.wrong(),
        "work/longhaul.toml:2: unknown table 'sever'\n    did you mean [server]?\n\
         work/longhaul.toml:4: unknown key 'slot' in [worker]\n    did you mean 'slots'?\n\
         work/longhaul.toml:5: unknown key 'colour' in [worker]\n    \
         [worker] may have drain, lease, manifests, model, queues, slots\n\
         work/longhaul.toml:7: unknown key 'max_pendin' in [queue.NAME]\n    did you mean 'max_pending'?"
    );
    let bed = Bed::new().here("listen = 1\nserver = 2\n[queue]\nmax_pending = 5\n");
    let told = bed.wrong();
    assert!(told.contains("longhaul.toml:1: unknown table 'listen'\n    there are artifacts, auth, "), "{told}");
    assert!(told.contains("longhaul.toml:2: 'server' must be a table\n    write [server] on a line"), "{told}");
    assert!(told.contains("longhaul.toml:4: 'max_pending' in [queue] must be a table"), "{told}");
}

#[test]
fn values_that_cannot_be_are_told_all_at_once() {
    let bed = Bed::new()
        .here("[server]\nlisten = \"nowhere\"\nmax_connections = 0\ncors_origins = [\"x.com\"]\n[worker]\nlease = 15\nslots = \"many\"\n[retention]\nfinished = 1979-05-27\n")
        .set("LONGHAUL_DRAIN", "soon");
    let told = bed.wrong();
    for expected in [
        "longhaul.toml:2: 'server.listen' 'nowhere' is not an address with a port",
        "longhaul.toml:3: 'server.max_connections' is 0",
        "longhaul.toml:4: 'server.cors_origins' has 'x.com', which is not an origin",
        "longhaul.toml:6: 'worker.lease' must be a time with its unit, like \"15s\"",
        "longhaul.toml:7: 'worker.slots' must be a whole number, not a string",
        "longhaul.toml:9: 'retention.finished' has a date",
        "LONGHAUL_DRAIN: 'soon' is not a time",
    ] {
        assert!(told.contains(expected), "{expected}\nis not in\n{told}");
    }
    let told = Bed::new().here("[server\n").wrong();
    assert!(told.starts_with("work/longhaul.toml:1: this is not TOML"), "{told}");
}

#[test]
fn secrets_come_from_files_too_and_are_never_shown() {
    let bed = Bed::new();
    let secret = bed.folder.path().join("secret");
    fs::write(&secret, "whsec_new,whsec_old\n").expect("written");
    let bed = bed
        .set("LONGHAUL_WEBHOOK_SECRET_FILE", &secret.display().to_string())
        .set("LONGHAUL_STORE", "postgres://me:hunter2@db/longhaul");
    let config = bed.config();
    let secrets: Vec<&str> = config.webhook.secrets.iter().map(Secret::expose).collect();
    assert_eq!(secrets, ["whsec_new", "whsec_old"]);
    assert_eq!(config.origin("webhook.secret").to_string(), "LONGHAUL_WEBHOOK_SECRET_FILE");
    let shown = format!("{:?}", config.rows);
    assert!(!shown.contains("whsec_") && !shown.contains("hunter2"), "{shown}");
    let told = Bed::new().set("LONGHAUL_WEBHOOK_SECRET_FILE", "/no/such/file").wrong();
    assert!(told.starts_with("LONGHAUL_WEBHOOK_SECRET_FILE: /no/such/file cannot be read"), "{told}");
}

#[test]
fn paths_in_a_file_are_relative_to_it() {
    let bed = Bed::new().user("[store]\nurl = \"sqlite:tasks.db\"\n[worker]\nmanifests = \"agents\"\n");
    let folder = bed.folder.path().join("config/longhaul");
    let config = bed.config();
    assert_eq!(config.store.url, format!("sqlite:{}", folder.join("tasks.db").display()));
    assert_eq!(config.worker.manifests, Some(folder.join("agents")));
    let config = bed.load(Flags::default().set("--store", "store.url", Some("sqlite:here.db"))).expect("right");
    assert_eq!(config.store.url, "sqlite:here.db");
}

#[test]
fn a_file_that_is_named_must_be_there_and_is_the_only_one() {
    let bed = Bed::new().here("[worker]\nslots = 1\n");
    let other = bed.folder.path().join("other.toml");
    let bed = bed.set("LONGHAUL_CONFIG", &other.display().to_string());
    assert!(bed.wrong().contains("other.toml: there is no such file"));
    fs::write(&other, "[worker]\nlease = \"1m\"\n").expect("written");
    let config = bed.config();
    assert_eq!((config.worker.slots, config.worker.lease.as_secs()), (16, 60));
    assert_eq!(config.files, [other]);
}

#[test]
fn queues_limits_tenants_and_retention_become_settings_of_the_store() {
    let bed = Bed::new().here(
        "[queue.urgent]\nmax_running = 2\nageing = \"1h\"\n[queue.\"a.b\"]\nmax_pending = 7\n\
         [limit.db]\nmax_running = 3\n[tenant.acme]\nmax_running = 9\nrate = 0.5\n[retention]\nfinished = \"7d\"\n",
    );
    let config = bed.config();
    let settings = config.settings();
    assert_eq!(settings.queues["urgent"].max_running, Some(2));
    assert_eq!(settings.queues["urgent"].max_pending, QueueSettings::default().max_pending);
    assert_eq!(settings.queues["a.b"].max_pending, 7);
    assert_eq!(settings.key_max_running["db"], 3);
    assert_eq!(settings.tenant_max_running["acme"], 9);
    assert_eq!(settings.retention, Some(Duration::from_secs(7 * 86_400)));
    assert_eq!(config.tenants["acme"].rate, Some(0.5));
}

#[test]
fn endpoints_are_tables_with_known_keys() {
    let bed = Bed::new()
        .here("[[webhook.endpoints]]\nname = \"ops\"\nurl = \"https://a.example/h\"\nevents = [\"*\"]\n");
    let endpoint = Endpoint {
        name: "ops".to_owned(),
        url: "https://a.example/h".to_owned(),
        events: vec!["*".to_owned()],
        tenant: "default".to_owned(),
    };
    assert_eq!(bed.config().webhook.endpoints, [endpoint]);
    let told = bed.here("[[webhook.endpoints]]\nname = \"ops\"\nulr = \"https://a.example/h\"\n").wrong();
    assert!(told.contains("unknown key 'ulr'; did you mean 'url'?"), "{told}");
    let told = Bed::new().here("[[webhook.endpoints]]\nname = \"ops\"\nurl = \"ftp://x\"\n").wrong();
    assert!(told.contains("has 'ops', whose url is not one"), "{told}");
}

/// The file with the lines behind a single `#` taken in.
fn uncommented(examples: bool) -> String {
    let (mut text, mut example) = (String::new(), false);
    for line in DEFAULT_FILE.lines() {
        match line.strip_prefix('#') {
            Some(rest) if rest.starts_with('#') => example |= rest.contains("example:"),
            Some(rest) if rest.starts_with(' ') || rest.is_empty() => {}
            Some(rest) if examples || !example => text = format!("{text}{rest}\n"),
            Some(_) => {}
            None => {
                example &= !line.is_empty();
                text = format!("{text}{line}\n");
            }
        }
    }
    text
}

#[test]
fn the_file_that_is_printed_has_the_defaults_and_every_key() {
    let plain = Bed::new().here(DEFAULT_FILE).config();
    assert!(plain.rows.iter().all(|row| row.origin == Origin::Default), "{:?}", plain.rows);
    let defaults = Bed::new().config();
    let set = Bed::new().here(&uncommented(false)).config();
    for row in &defaults.rows {
        // These differ by the folder.
        if !["store.url", "artifacts.url"].contains(&row.key.as_str()) {
            let now = set.rows.iter().find(|set| set.key == row.key).expect("the same keys");
            assert_eq!((&now.key, &now.value), (&row.key, &row.value));
        }
    }
    let queue = set.settings().queues["default"];
    assert_eq!(queue, QueueSettings::default());
    let all = Bed::new().here(&uncommented(true)).config();
    let missing: Vec<&Row> = all.rows.iter().filter(|row| row.origin == Origin::Default).collect();
    assert!(missing.is_empty(), "not in the file: {missing:?}");
}

#[test]
fn artifacts_are_kept_beside_the_store_unless_it_is_said_where() {
    let url = |bed: Bed| {
        bed.config()
            .artifacts
            .url
            .expect("there is a home folder")
            .replace(&bed.folder.path().display().to_string(), "")
    };
    assert_eq!(url(Bed::new().set("LONGHAUL_STORE", "sqlite:some/where.db")), "some/artifacts");
    assert_eq!(url(Bed::new().set("LONGHAUL_STORE", "postgres://me@host/db")), "/data/longhaul/artifacts");
    assert_eq!(url(Bed::new().set("LONGHAUL_STORE", "memory:")), "memory:");
    assert_eq!(url(Bed::new().set("LONGHAUL_ARTIFACTS", "s3://bucket/x")), "s3://bucket/x");
    assert_eq!(url(Bed::new().here("[artifacts]\nurl = \"large\"\n")), "/work/large");
    assert_eq!(url(Bed::new().here("[artifacts]\nurl = \"s3://bucket\"\n")), "s3://bucket");
}

#[test]
fn what_is_taken_from_the_bus_is_given_its_time() {
    let bus = "[bus]\nurl = \"nats://h\"\n";
    let config = Bed::new().here(&format!("{bus}ack_wait = \"20s\"\n")).config();
    assert_eq!(config.bus.expect("a bus").ack_wait, Duration::from_secs(20));
    let wrong = Bed::new().here(&format!("{bus}ack_wait = \"5s\"\n")).wrong();
    assert!(wrong.contains("too short") && wrong.contains("10s"), "{wrong}");
}

#[test]
fn every_file_is_a_configuration_or_everything_wrong_with_it_is_said() {
    use longhaul_hostile::Judged;
    let bed = Bed::new();
    let file = bed.folder.path().join("work/longhaul.toml");
    longhaul_hostile::check("config", 3_000, |text| {
        fs::write(&file, text).expect("written");
        match bed.load(Flags::default()) {
            Ok(config) => {
                // What holds can be shown, and told to the store.
                assert!(config.rows.iter().all(|row| !row.key.is_empty()));
                let _ = config.settings();
                Judged::Accepted
            }
            Err(Wrong(faults)) => {
                assert!(!faults.is_empty() && faults.iter().all(|fault| !fault.remedy.is_empty()), "{faults:?}");
                Judged::Refused
            }
        }
    });
}

#[test]
fn every_variable_is_a_value_or_is_said_to_be_wrong() {
    use longhaul_hostile::Judged;
    let names =
        ["LONGHAUL_STORE", "LONGHAUL_LISTEN", "LONGHAUL_RETENTION", "LONGHAUL_AUTH_REQUIRED", "LONGHAUL_BUS"];
    longhaul_hostile::check("values", 3_000, |text| {
        let text = String::from_utf8_lossy(text);
        let judge = |name: &&str| Bed::new().set(name, &text).load(Flags::default()).is_ok();
        // A variable cannot have a NUL in it.
        if !text.contains('\0') && names.iter().any(judge) { Judged::Accepted } else { Judged::Refused }
    });
}
