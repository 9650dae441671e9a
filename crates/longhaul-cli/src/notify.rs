//! Tells a service manager (systemd) how the program stands, when one asked for it by `NOTIFY_SOCKET`.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// It works from now on.
pub(crate) fn ready() {
    tell("READY=1");
}

/// It was told to stop, and finishes what it has.
pub(crate) fn stopping() {
    tell("STOPPING=1");
}

fn tell(state: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty()) else { return };
    if let Err(error) = send(&socket, state) {
        tracing::warn!(%error, state, "the service manager could not be told");
    }
}

/// A name that begins with @ is an abstract one.
fn send(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    // A manager that does not listen must not hold up the program.
    sender.set_nonblocking(true)?;
    sender.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abstract_socket_is_found_by_its_name() {
        let name = format!("longhaul-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a name");
        let listener = UnixDatagram::bind_addr(&address).expect("bound");
        send(OsStr::new(&format!("@{name}")), "READY=1").expect("sent");
        let mut buffer = [0; 64];
        let read = listener.recv(&mut buffer).expect("heard");
        assert_eq!(&buffer[..read], b"READY=1");
    }
}
