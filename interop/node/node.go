// Package node runs the built devlet for the programs of interop, and counts
// their results.
package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Node is a running `devlet serve`.
type Node struct {
	binary, root string
	daemon       *exec.Cmd
	ended        chan error
	log          *Log
}

// Log collects the output of a process.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Start runs devlet on a root directory, with more flags of serve, and returns once it answers.
func Start(binary, root string, flags ...string) (*Node, error) {
	n := &Node{binary: binary, root: root, ended: make(chan error, 1), log: &Log{}}
	n.daemon = exec.Command(binary, append([]string{"serve", "--root-dir", root}, flags...)...)
	n.daemon.Stdout, n.daemon.Stderr = n.log, n.log
	n.daemon.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := n.daemon.Start(); err != nil {
		return nil, err
	}
	go func() { n.ended <- n.daemon.Wait() }()
	err := Until(15*time.Second, func() error {
		// Not status: it fails while an operator has to decide.
		_, err := n.Run("get", "pods")
		return err
	})
	if err != nil {
		n.daemon.Process.Kill()
		return nil, fmt.Errorf("devlet does not start: %w\n%s", err, n.log)
	}
	return n, nil
}

// Stop stops devlet. Any exit code but 0 is an error.
func (n *Node) Stop() error {
	n.daemon.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-n.ended:
		if err != nil {
			return fmt.Errorf("devlet stops with %w\n%s", err, n.log)
		}
		return nil
	case <-time.After(20 * time.Second):
		n.daemon.Process.Kill()
		return fmt.Errorf("devlet does not stop\n%s", n.log)
	}
}

// PID returns the process ID of devlet.
func (n *Node) PID() int { return n.daemon.Process.Pid }

// Log returns the output of devlet so far.
func (n *Node) Log() string { return n.log.String() }

// Run runs a command of devlet against this node and returns its output.
func (n *Node) Run(args ...string) ([]byte, error) {
	out, err := exec.Command(n.binary, append(args, "--root-dir", n.root)...).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil, fmt.Errorf("devlet %s: %s: %s", strings.Join(args, " "), err, bytes.TrimSpace(exit.Stderr))
	}
	return out, err
}

// RunAny runs a command and returns its output, also with exit code 1.
func (n *Node) RunAny(args ...string) ([]byte, error) {
	out, err := exec.Command(n.binary, append(args, "--root-dir", n.root)...).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 1 {
		err = nil
	}
	return out, err
}

// Ask runs a command of devlet and decodes its JSON.
func (n *Node) Ask(into any, args ...string) error {
	out, err := n.Run(append(args, "-o", "json")...)
	if err != nil {
		return err
	}
	return json.Unmarshal(out, into)
}

// Kill ends devlet as in a crash.
func (n *Node) Kill() {
	n.daemon.Process.Kill()
	<-n.ended
}

// Pod is an admitted pod.
type Pod struct {
	Pod        struct{ UID, Namespace, Name string }
	Containers []Container
	Claims     []Claim
}

// Claim is a claim of a pod.
type Claim struct {
	Name, Namespace, UID string
	Drivers              []ClaimDriver
}

// ClaimDriver is a driver's part of a claim.
type ClaimDriver struct {
	Name    string
	Devices []json.RawMessage
}

// Container is a container of a pod, with its devices.
type Container struct {
	Name    string
	Devices []struct {
		Resource string
		IDs      []string
	}
	Envs        map[string]string
	Mounts      []Mount
	DeviceNodes []DeviceNode
	Annotations map[string]string
	CDIDevices  []string
}

// Mount is a file or directory of the host in a container.
type Mount struct {
	ContainerPath, HostPath string
	ReadOnly                bool
}

// DeviceNode is a device of the host in a container.
type DeviceNode struct{ ContainerPath, HostPath, Permissions string }

// Admit admits a pod with one container.
func (n *Node) Admit(name string, limits ...string) (Pod, error) {
	args := []string{"admit", "--name", name, "--wait", "40s"}
	for _, limit := range limits {
		args = append(args, "--limit", limit)
	}
	var pod Pod
	err := n.Ask(&pod, args...)
	if err == nil && len(pod.Containers) != 1 {
		err = fmt.Errorf("%d containers", len(pod.Containers))
	}
	return pod, err
}

// AdmitFiles admits a pod from manifests: its own, and those of its claims.
func (n *Node) AdmitFiles(files ...string) (Pod, error) {
	args := []string{"admit", "--wait", "40s"}
	for _, file := range files {
		args = append(args, "-f", file)
	}
	var pod Pod
	err := n.Ask(&pod, args...)
	if err == nil && len(pod.Containers) != 1 {
		err = fmt.Errorf("%d containers", len(pod.Containers))
	}
	return pod, err
}

// Resource is a resource with current or former devices.
type Resource struct {
	Name                              string
	Capacity, Allocatable, Held, Free int
}

// Resource returns one resource by name.
func (n *Node) Resource(name string) (Resource, error) {
	var all struct{ Resources []Resource }
	if err := n.Ask(&all, "get", "resources"); err != nil {
		return Resource{}, err
	}
	for _, r := range all.Resources {
		if r.Name == name {
			return r, nil
		}
	}
	return Resource{}, fmt.Errorf("there is no %s", name)
}

// Until retries until there is no error, or the time is over.
func Until(timeout time.Duration, try func() error) error {
	for deadline := time.Now().Add(timeout); ; {
		err := try()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// Results are printed one by one, and counted.
type Results struct{ passed, failed int }

// Check prints and counts one result.
func (r *Results) Check(name string, err error) bool {
	if err != nil {
		r.failed++
		fmt.Printf("%s: FAILED: %v\n", name, err)
		return false
	}
	r.passed++
	fmt.Printf("%s: ok\n", name)
	return true
}

// End prints the counts, and exits.
func (r *Results) End() {
	fmt.Printf("%d passed, %d failed\n", r.passed, r.failed)
	if r.failed > 0 || r.passed == 0 {
		os.Exit(1)
	}
}

// Failed returns the number of failures so far.
func (r *Results) Failed() int { return r.failed }
