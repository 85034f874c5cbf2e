//! The `Registration` services on `kubelet.sock`: v1beta1, and v1alpha2 for plugins of 2017.

use std::path::{Component, Path, PathBuf};

use devlet_core::device_plugin::rejections::Rejection;
use devlet_core::{InvalidResourceName, ProcessId, ResourceName};
use devlet_kubelet_api::device_plugin::v1alpha2::registration_server as server_v1alpha2;
use devlet_kubelet_api::device_plugin::v1beta1::registration_server as server;
use devlet_kubelet_api::device_plugin::{v1alpha2, v1beta1};
use devlet_uds::PeerCred;
use tonic::{Request, Response, Status};

use crate::device_plugin::client::Api;
use crate::peer_text::{refusal, shorten};
use crate::workflow::register_plugin::{Candidate, Registrar};

/// Why a registration is malformed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidOffer {
    /// The text is the kubelet's.
    #[error(
        "requested API version {version:?} is not supported by kubelet. Supported version is [{supported:?}]"
    )]
    Version {
        /// The version of the request.
        version: String,
        /// The version of the service.
        supported: &'static str,
    },
    /// The text is the kubelet's.
    #[error(transparent)]
    ResourceName(#[from] InvalidResourceName),
    /// The path could lead out of the directory. A kubelet accepts it.
    #[error("the endpoint {0:?} is not the plain name of a socket in the device plugin directory")]
    Endpoint(String),
    /// The kernel did not report the caller's credentials.
    #[error("the caller's user is not known")]
    UnknownCaller,
}

/// The service for both versions.
#[derive(Debug, Clone)]
pub struct RegistrationService {
    registrar: Registrar,
}

impl RegistrationService {
    pub fn new(registrar: Registrar) -> Self {
        Self { registrar }
    }

    /// Returns the candidate that a request describes. Records the rejection of a malformed request.
    fn candidate(
        &self,
        fields: (String, &str, &str),
        api: Api,
        caller: Option<&PeerCred>,
    ) -> Result<Candidate, Status> {
        let (_, endpoint, resource) = fields;
        let parsed = self.parse(fields, api, caller);
        parsed.map_err(|problem| {
            let process = caller.map(|&PeerCred { uid, pid, .. }| ProcessId { uid, pid });
            if process.is_some_and(|process| !self.registrar.is_within_rate(process)) {
                // Not recorded: a process could otherwise change the node at any rate.
                return refusal(problem);
            }
            self.registrar.metrics.registration_refused("invalid");
            let socket = self.socket(endpoint).map(|socket| socket.display().to_string());
            self.registrar.rejected(Rejection {
                resource: resource.to_owned(),
                endpoint: socket.unwrap_or_else(|| endpoint.to_owned()),
                uid: caller.map(|caller| caller.uid),
                pid: caller.and_then(|caller| caller.pid),
                reason: problem.to_string(),
            });
            refusal(problem)
        })
    }

    fn parse(
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
        let resource: ResourceName = ResourceName::parse(resource)?;
        let socket = self.socket(endpoint);
        let socket = socket.ok_or_else(|| InvalidOffer::Endpoint(endpoint.to_owned()))?;
        let &PeerCred { uid, pid, .. } = caller.ok_or(InvalidOffer::UnknownCaller)?;
        Ok(Candidate {
            resource,
            socket,
            api,
            process: ProcessId { uid, pid },
        })
    }

    /// Returns the socket of an endpoint, or `None` if it is not the plain name of a file in the device plugin directory.
    fn socket(&self, endpoint: &str) -> Option<PathBuf> {
        let mut parts = Path::new(endpoint).components();
        let (Some(Component::Normal(name)), None) = (parts.next(), parts.next()) else {
            return None;
        };
        let is_plain = name.as_encoded_bytes() == endpoint.as_bytes();
        is_plain.then(|| self.registrar.config.device_plugins().join(name))
    }
}

#[tonic::async_trait]
impl server::Registration for RegistrationService {
    async fn register(
        &self,
        request: Request<v1beta1::RegisterRequest>,
    ) -> Result<Response<v1beta1::Empty>, Status> {
        let caller = request.extensions().get::<PeerCred>().copied();
        let request = request.into_inner();
        let (endpoint, resource) = (shorten(request.endpoint), shorten(request.resource_name));
        let fields = (shorten(request.version), endpoint.as_str(), resource.as_str());
        let candidate = self.candidate(fields, Api::V1beta1, caller.as_ref())?;
        self.registrar.check_rate(&candidate).await.map_err(refusal)?;
        match self.registrar.register_in_task(candidate).await {
            Ok(Some(Ok(_))) => Ok(Response::new(v1beta1::Empty {})),
            Ok(Some(Err(error))) => Err(refusal(error)),
            Ok(None) => Err(refusal("devlet is stopping")),
            // The runtime cancels tasks only when it stops.
            Err(error) if error.is_cancelled() => Err(refusal("devlet is stopping")),
            Err(_) => Err(refusal("an internal error of devlet; its log describes it")),
        }
    }
}

#[tonic::async_trait]
impl server_v1alpha2::Registration for RegistrationService {
    /// Answers before the plugin is dialled: plugins of 2017 do not serve earlier.
    async fn register(
        &self,
        request: Request<v1alpha2::RegisterRequest>,
    ) -> Result<Response<v1alpha2::Empty>, Status> {
        let caller = request.extensions().get::<PeerCred>().copied();
        let request = request.into_inner();
        let (endpoint, resource) = (shorten(request.endpoint), shorten(request.resource_name));
        let fields = (shorten(request.version), endpoint.as_str(), resource.as_str());
        let candidate = self.candidate(fields, Api::V1alpha2, caller.as_ref())?;
        self.registrar.check_rate(&candidate).await.map_err(refusal)?;
        drop(self.registrar.register_in_task(candidate));
        Ok(Response::new(v1alpha2::Empty {}))
    }
}
