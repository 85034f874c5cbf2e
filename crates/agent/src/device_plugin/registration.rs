//! `Registration` on `kubelet.sock`, as plugins of today and of 2017 call it.

use std::path::{Component, Path};

use devlet_core::ResourceName;
use devlet_kubelet_api::device_plugin::v1alpha2::registration_server as server_2017;
use devlet_kubelet_api::device_plugin::v1beta1::registration_server as server;
use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};
use tonic::{Request, Response, Status};

use super::client::Api;
use super::resource_name::{self, InvalidResourceName};
use crate::grpc::status::refusal;
use crate::grpc::uds::PeerCred;
use crate::workflow::register::{Candidate, Registrar};

/// Why a request to register is not even looked into.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidOffer {
    /// The text is the kubelet's.
    #[error(
        "requested API version {version:?} is not supported by kubelet. Supported version is [{supported:?}]"
    )]
    Version {
        /// What the plugin speaks.
        version: String,
        /// What is spoken here.
        supported: &'static str,
    },
    /// The text is the kubelet's.
    #[error(transparent)]
    ResourceName(#[from] InvalidResourceName),
    /// A kubelet joins whatever it is given; a path must not lead out of the directory.
    #[error("the endpoint {0:?} is not the plain name of a socket in the device plugin directory")]
    Endpoint(String),
    /// The kernel does not say who is there.
    #[error("the caller's user is not known")]
    UnknownCaller,
}

/// The service, for both protocols.
#[derive(Debug, Clone)]
pub struct RegistrationService {
    registrar: Registrar,
}

impl RegistrationService {
    pub fn new(registrar: Registrar) -> Self {
        Self { registrar }
    }

    fn candidate(
        &self,
        (version, endpoint, resource): (String, &str, &str),
        api: Api,
        caller: Option<&PeerCred>,
    ) -> Result<Candidate, InvalidOffer> {
        let supported = match api {
            Api::V1beta1 => v1beta1::VERSION,
            Api::V1alpha2 => v1alpha2::VERSION,
        };
        if version != supported {
            return Err(InvalidOffer::Version { version, supported });
        }
        let resource: ResourceName = resource_name::parse(resource)?;
        let mut parts = Path::new(endpoint).components();
        let (Some(Component::Normal(name)), None) = (parts.next(), parts.next()) else {
            return Err(InvalidOffer::Endpoint(endpoint.to_owned()));
        };
        if name.as_encoded_bytes() != endpoint.as_bytes() {
            return Err(InvalidOffer::Endpoint(endpoint.to_owned()));
        }
        let &PeerCred { uid, pid, .. } = caller.ok_or(InvalidOffer::UnknownCaller)?;
        Ok(Candidate {
            resource,
            socket: self.registrar.config.device_plugins().join(name),
            api,
            uid,
            pid,
        })
    }
}

#[tonic::async_trait]
impl server::Registration for RegistrationService {
    async fn register(
        &self,
        request: Request<v1beta1::RegisterRequest>,
    ) -> Result<Response<v1beta1::Empty>, Status> {
        let caller = request.extensions().get::<PeerCred>().copied();
        let wish = request.into_inner();
        let wish = (wish.version, wish.endpoint.as_str(), wish.resource_name.as_str());
        let candidate = self
            .candidate(wish, Api::V1beta1, caller.as_ref())
            .inspect_err(|_| self.registrar.metrics.registration_refused("invalid"))
            .map_err(refusal)?;
        let resource = candidate.resource.clone();
        match self.registrar.register(candidate).await {
            Ok(_) => Ok(Response::new(v1beta1::Empty {})),
            Err(error) => {
                self.registrar.say_refused(&resource, &error);
                Err(refusal(error))
            }
        }
    }
}

#[tonic::async_trait]
impl server_2017::Registration for RegistrationService {
    /// Plugins of 2017 serve only once they have been answered: they are dialled afterwards.
    async fn register(
        &self,
        request: Request<v1alpha2::RegisterRequest>,
    ) -> Result<Response<v1alpha2::Empty>, Status> {
        let caller = request.extensions().get::<PeerCred>().copied();
        let wish = request.into_inner();
        let wish = (wish.version, wish.endpoint.as_str(), wish.resource_name.as_str());
        let candidate = self
            .candidate(wish, Api::V1alpha2, caller.as_ref())
            .inspect_err(|_| self.registrar.metrics.registration_refused("invalid"))
            .map_err(refusal)?;
        let slowed_down = self.registrar.slow_down(&candidate).await;
        slowed_down.map_err(|error| {
            self.registrar.say_refused(&candidate.resource, &error);
            refusal(error)
        })?;
        let (registrar, stop) = (self.registrar.clone(), self.registrar.stop.clone());
        self.registrar.tasks.spawn(async move {
            let resource = candidate.resource.clone();
            tokio::select! {
                ended = registrar.take_in(candidate) => if let Err(error) = ended {
                    registrar.say_refused(&resource, &error);
                },
                () = stop.cancelled() => {}
            }
        });
        Ok(Response::new(v1alpha2::Empty {}))
    }
}
