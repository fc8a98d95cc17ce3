//! Listens for the ranks of a job, or for launchers.

use std::net::{IpAddr, TcpListener, ToSocketAddrs};

use super::environment::is_loopback;
use super::error::{LaunchError, Result};
use super::port;
use comm::{StoreConfig, StoreEvent, StoreServer};

/// Returns the address to listen on so that other processes can connect to `host`. Prefers the one address of `host`. Returns
/// all addresses (`0.0.0.0`) if `host` does not resolve, on this machine, to an address that other hosts can use: a service's
/// name, or 127.0.1.1 in /etc/hosts. `note` gets a sentence for the user if the name cannot be resolved.
pub(super) fn listen_address(host: &str, several_hosts: bool, note: impl FnOnce(&str)) -> String {
    const ALL: &str = "0.0.0.0";
    let literal = host.parse::<IpAddr>().is_ok();
    if literal || is_loopback(host) || !several_hosts {
        return host.to_owned();
    }
    match (host, 0).to_socket_addrs() {
        Ok(mut addresses) => addresses
            .find(|address| !address.ip().is_loopback() && TcpListener::bind(address).is_ok())
            .map_or_else(|| ALL.to_owned(), |address| address.ip().to_string()),
        Err(error) => {
            note(&format!("note: cannot resolve {host} (MASTER_ADDR): {error}; listening on all addresses"));
            ALL.to_owned()
        }
    }
}

/// Does what [`StoreServer::bind`] does, with errors that name the port and the process that listens on it.
///
/// # Errors
/// This process cannot listen on the address.
pub(super) fn bind(
    host: &str,
    port: u16,
    config: StoreConfig,
    on_event: impl FnMut(StoreEvent) + Send + 'static,
) -> Result<StoreServer> {
    let address = port::host_port(host, port);
    // Try to bind here first, since the store's own error does not name the process that has the port.
    if port != 0 {
        TcpListener::bind(&address).map_err(|error| port::cannot_listen(host, port, &error))?;
    }
    StoreServer::bind(address, config, on_event).map_err(LaunchError::from)
}
