package cluster

import (
	"io"
	"net"
	"net/url"
	"sync"
)

// Relay forwards connections to the API server.
type Relay struct {
	// Server is the URL of the API server through it.
	Server string

	listener net.Listener
	upstream string

	mu      sync.Mutex
	open    []net.Conn
	callers []net.Conn
}

// NewRelay starts a relay.
func (c *Cluster) NewRelay() (*Relay, error) {
	server, err := url.Parse(c.Server)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &Relay{Server: "https://" + listener.Addr().String(), listener: listener, upstream: server.Host}
	go r.serve()
	return r, nil
}

func (r *Relay) serve() {
	for {
		caller, err := r.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", r.upstream)
		if err != nil {
			caller.Close()
			continue
		}
		r.mu.Lock()
		r.open = append(r.open, server)
		r.callers = append(r.callers, caller)
		r.mu.Unlock()
		go forward(server, caller)
		go forward(caller, server)
	}
}

// forward copies until either side ends. The other direction then ends, too, except after Silence.
func forward(to, from net.Conn) {
	if _, err := io.Copy(to, from); err == nil {
		to.Close()
	}
}

// Silence cuts the connections to the API server. The callers are not notified, as when a firewall forgets a connection.
func (r *Relay) Silence() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, server := range r.open {
		server.Close()
	}
	r.open = nil
}

// Cut ends the connections of the callers, who connect again.
func (r *Relay) Cut() {
	r.Silence()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, caller := range r.callers {
		caller.Close()
	}
	r.callers = nil
}

// Stop accepts no further connections.
func (r *Relay) Stop() { r.listener.Close() }
