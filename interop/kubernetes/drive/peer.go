package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"devlet.test/interop/node"
)

// peer is a device plugin or DRA driver of testkit, whose script and commands
// crates/testkit/examples/testkit-plugin.rs describes.
type peer struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	ended chan struct{}

	mu     sync.Mutex
	events []peerEvent
}

// peerEvent is an event of a peer.
type peerEvent struct {
	Event, Method, Command, Reason string
	IDs                            []string
	Claims                         []struct{ Namespace, Name, UID string }
}

// plugin starts a device plugin with healthy devices: device-0, device-1, and so on.
func (h *host) plugin(resource string, devices int) *peer {
	return h.peer(Object{"root": h.root, "resource": resource, "devices": pluginDevices(devices)})
}

func pluginDevices(count int) []any {
	devices := []any{}
	for i := range count {
		devices = append(devices, Object{"id": fmt.Sprintf("device-%d", i)})
	}
	return devices
}

// testDriver starts a DRA driver that prepares device-0 of the node's pool for
// any claim, with health reports. It publishes no slices.
func (h *host) testDriver(name string) *peer {
	return h.peer(Object{
		"root": h.root, "driver": name, "services": []string{"v1.DRAPlugin", "v1.DRAResourceHealth"},
		"devices": []any{Object{"pool": h.name, "device": "device-0", "cdi": []string{"devlet.test/device={uid}"}}},
	}, "--driver")
}

// peer starts a peer with a script.
func (h *host) peer(script Object, flags ...string) *peer {
	text, err := json.Marshal(script)
	h.t.ok(err)
	p := &peer{cmd: exec.Command(*testkit, append(flags, string(text))...), ended: make(chan struct{})}
	log, err := os.OpenFile(filepath.Join(h.t.dir, "testkit.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	h.t.ok(err)
	defer log.Close()
	p.cmd.Stderr = log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.stdin, err = p.cmd.StdinPipe()
	h.t.ok(err)
	stdout, err := p.cmd.StdoutPipe()
	h.t.ok(err)
	h.t.ok(p.cmd.Start())
	go p.listen(stdout)
	h.t.cleanup(p.kill)
	h.t.ok(node.Until(soon, func() error {
		select {
		case <-p.ended:
			return nil
		default:
		}
		if len(p.all()) == 0 {
			return errors.New("the peer does not serve")
		}
		return nil
	}))
	if len(p.all()) == 0 {
		h.t.ok(fmt.Errorf("the peer has ended; see %s", log.Name()))
	}
	return p
}

func (p *peer) listen(stdout io.Reader) {
	defer close(p.ended)
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		var event peerEvent
		if json.Unmarshal(lines.Bytes(), &event) == nil {
			p.mu.Lock()
			p.events = append(p.events, event)
			p.mu.Unlock()
		}
	}
}

// all returns the events so far.
func (p *peer) all() []peerEvent {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.events[:len(p.events):len(p.events)]
}

// asked returns the number of calls of a method that named a claim.
func (p *peer) asked(method, claimUID string) int {
	count := 0
	for _, event := range p.all() {
		for _, claim := range event.Claims {
			if event.Event == "asked" && event.Method == method && claim.UID == claimUID {
				count++
			}
		}
	}
	return count
}

// awaitAsked waits until a call of a method has named a claim.
func (p *peer) awaitAsked(method, claimUID string) error {
	return node.Until(soon, func() error {
		if p.asked(method, claimUID) == 0 {
			return fmt.Errorf("%s has not named the claim", method)
		}
		return nil
	})
}

// awaitEvent waits until the peer has reported an event.
func (p *peer) awaitEvent(name string) error {
	return node.Until(soon, func() error {
		for _, event := range p.all() {
			if event.Event == name {
				return nil
			}
		}
		return fmt.Errorf("the peer has not reported %s", name)
	})
}

// command runs a command of the peer.
func (p *peer) command(words ...string) error {
	before := len(p.all())
	line := strings.Join(words, " ")
	if _, err := fmt.Fprintln(p.stdin, line); err != nil {
		return err
	}
	return node.Until(soon, func() error {
		for _, event := range p.all()[before:] {
			switch {
			case event.Event == "refused":
				return errors.New(event.Reason)
			case event.Event == "done" && event.Command == line:
				return nil
			}
		}
		return fmt.Errorf("%s is not done", line)
	})
}

// kill ends the peer as in a crash: its sockets stay.
func (p *peer) kill() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// stop ends the peer, which removes its sockets.
func (p *peer) stop() {
	p.stdin.Close()
	p.cmd.Wait()
}
