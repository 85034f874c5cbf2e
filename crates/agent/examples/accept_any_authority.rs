//! Serves `Registration` on a unix socket to all processes that dial it, and counts the calls.
//!
//! `accept_any_authority SOCKET` serves until it is terminated, and then prints the count. With
//! `STOCK=1` in its environment it serves as tonic alone does, which rejects clients that send a path as
//! `:authority`.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use devlet_kubelet_api::device_plugin::v1beta1::registration_server::{Registration, RegistrationServer};
use devlet_kubelet_api::device_plugin::v1beta1::{Empty, RegisterRequest};
use devlet_uds::PeerCred;
use devlet_uds::server::{ServerLimits, ignore_refusals, serve};
use tokio::signal::unix::{SignalKind, signal};
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

struct Counting {
    calls: Arc<AtomicUsize>,
    is_stock: bool,
}

#[tonic::async_trait]
impl Registration for Counting {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        if !self.is_stock && request.extensions().get::<PeerCred>().is_none() {
            return Err(Status::internal("the caller is unknown"));
        }
        if request.get_ref().version != "v1beta1" {
            return Err(Status::invalid_argument("not a registration of v1beta1"));
        }
        self.calls.fetch_add(1, Ordering::Relaxed);
        Ok(Response::new(Empty {}))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os()
        .nth(1)
        .ok_or("usage: accept_any_authority SOCKET")?;
    let is_stock = std::env::var_os("STOCK").is_some();
    let calls = Arc::new(AtomicUsize::new(0));
    let registration = RegistrationServer::new(Counting {
        calls: calls.clone(),
        is_stock,
    });
    let mut terminated = signal(SignalKind::terminate())?;
    let stopped = async {
        terminated.recv().await;
    };
    if is_stock {
        let incoming = tokio_stream::wrappers::UnixListenerStream::new(tokio::net::UnixListener::bind(path)?);
        Server::builder()
            .add_service(registration)
            .serve_with_incoming_shutdown(incoming, stopped)
            .await?;
    } else {
        let listener = devlet_uds::listen(path, devlet_uds::DEFAULT_MODE)?;
        serve(
            listener,
            Routes::new(registration),
            ServerLimits::default(),
            ignore_refusals(),
            stopped,
        )
        .await?;
    }
    println!("{} calls", calls.load(Ordering::Relaxed));
    Ok(())
}
