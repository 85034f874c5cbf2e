// Package cluster runs a real Kubernetes control plane on loopback for tests:
// etcd, kube-apiserver, kube-scheduler and kube-controller-manager. There is no
// kubelet, and the controller that judges nodes by heartbeats is left out.
package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"devlet.test/interop/node"
)

// controllers are all that pods with devices need, without node-lifecycle.
const controllers = "resourceclaim-controller,serviceaccount-controller,root-ca-certificate-publisher-controller," +
	"garbage-collector-controller,namespace-controller,device-taint-eviction-controller"

// readiness is the time that a component may take to become ready on a busy machine.
const readiness = 90 * time.Second

// Cluster is a control plane.
type Cluster struct {
	// Dir has all its files, Bin its programs.
	Dir, Bin string
	// Server is the URL of the API server.
	Server    string
	Authority *Authority
	// Admin may do everything.
	Admin *Client

	Etcd, APIServer, Scheduler, ControllerManager *Process

	// AdminConfig is the path of the administrator's kubeconfig.
	AdminConfig string

	etcdURL string
}

// User is an identity: a certificate, or the path of a file with a token.
type User struct {
	Name  string
	Token string
	Files
}

// Start starts a control plane and returns once pods can be created. Its files
// are in a new directory; the flags are added to those of the API server.
func Start(bin, dir string, flags ...string) (*Cluster, error) {
	c := &Cluster{Dir: dir, Bin: bin}
	if err := c.prepare(flags); err != nil {
		return nil, err
	}
	if err := errors.Join(c.Etcd.Start(), c.APIServer.Start()); err != nil {
		return nil, err
	}
	if err := c.Ready(); err != nil {
		c.Stop()
		return nil, err
	}
	if err := errors.Join(c.Scheduler.Start(), c.ControllerManager.Start()); err != nil {
		return nil, err
	}
	// Without it, pods are refused.
	_, err := c.Admin.Await("/api/v1/namespaces/default/serviceaccounts/default", readiness, Exists)
	if err != nil {
		err = errors.Join(err, c.ControllerManager.Running(), c.Scheduler.Running())
		c.Stop()
		return nil, err
	}
	return c, nil
}

// Exists is the condition that an object exists.
func Exists(o Object) error {
	if o == nil {
		return errors.New("it does not exist")
	}
	return nil
}

func (c *Cluster) prepare(flags []string) error {
	pki := filepath.Join(c.Dir, "pki")
	var err error
	if c.Authority, err = NewAuthority(pki); err != nil {
		return err
	}
	serving, err := c.Authority.Issue("apiserver", Subject{
		User: "kube-apiserver", Hosts: []string{"127.0.0.1", "localhost", "kubernetes.default.svc", "10.0.0.1"},
	})
	if err != nil {
		return err
	}
	signing := Files{Cert: filepath.Join(pki, "tokens.pub"), Key: filepath.Join(pki, "tokens.key")}
	key, err := writeKey(signing.Key)
	if err != nil {
		return err
	}
	if err := writePublicKey(signing.Cert, key); err != nil {
		return err
	}
	ports, err := freePorts(3)
	if err != nil {
		return err
	}
	c.etcdURL = "http://127.0.0.1:" + ports[0]
	peerURL := "http://127.0.0.1:" + ports[1]
	c.Server = "https://127.0.0.1:" + ports[2]
	admin, err := c.ClientCertificate("admin", Subject{User: "admin", Groups: []string{"system:masters"}})
	if err != nil {
		return err
	}
	if c.Admin, err = c.Client(admin); err != nil {
		return err
	}
	if c.AdminConfig, err = c.Kubeconfig(admin); err != nil {
		return err
	}
	configs := map[string]string{}
	for _, name := range []string{"kube-scheduler", "kube-controller-manager"} {
		user, err := c.ClientCertificate(name, Subject{User: "system:" + name})
		if err != nil {
			return err
		}
		if configs[name], err = c.Kubeconfig(user); err != nil {
			return err
		}
	}

	gates, err := c.featureGates()
	if err != nil {
		return err
	}
	c.Etcd = c.process("etcd",
		"--data-dir="+c.etcdData(), "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls="+c.etcdURL, "--advertise-client-urls="+c.etcdURL,
		"--listen-peer-urls="+peerURL, "--initial-advertise-peer-urls="+peerURL,
		"--initial-cluster=default="+peerURL)
	c.APIServer = c.process("kube-apiserver", append([]string{
		"--etcd-servers=" + c.etcdURL, "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
		"--secure-port=" + ports[2], "--tls-cert-file=" + serving.Cert, "--tls-private-key-file=" + serving.Key,
		"--client-ca-file=" + c.Authority.File, "--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction", "--service-cluster-ip-range=10.0.0.0/24",
		"--endpoint-reconciler-type=none", "--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + signing.Cert, "--service-account-signing-key-file=" + signing.Key,
		gates, "--runtime-config=resource.k8s.io/v1alpha3=true,resource.k8s.io/v1beta2=true", "--allow-privileged",
	}, flags...)...)
	c.Scheduler = c.process("kube-scheduler", gates,
		"--kubeconfig="+configs["kube-scheduler"], "--secure-port=0", "--leader-elect=false")
	c.ControllerManager = c.process("kube-controller-manager", gates,
		"--kubeconfig="+configs["kube-controller-manager"], "--secure-port=0", "--leader-elect=false",
		"--controllers="+controllers, "--use-service-account-credentials",
		"--service-account-private-key-file="+signing.Key, "--root-ca-file="+c.Authority.File)
	return nil
}

// featureGates returns the flag that enables what the scenarios need, as far as the release has a gate for it.
func (c *Cluster) featureGates() (string, error) {
	help, err := exec.Command(filepath.Join(c.Bin, "kube-apiserver"), "--help").Output()
	if err != nil {
		return "", fmt.Errorf("kube-apiserver does not start: %w", err)
	}
	gates := "--feature-gates="
	for _, gate := range []string{"DRADeviceTaintRules", "DRADeviceTaints", "DRAExtendedResource", "ResourceHealthStatus"} {
		if strings.Contains(string(help), "kube:"+gate+"=") {
			gates += gate + "=true,"
		}
	}
	return strings.TrimSuffix(gates, ","), nil
}

func (c *Cluster) process(program string, args ...string) *Process {
	return NewProcess(c.Dir, filepath.Join(c.Bin, program), args...)
}

func (c *Cluster) etcdData() string { return filepath.Join(c.Dir, "etcd") }

// Stop kills all processes; the files stay.
func (c *Cluster) Stop() {
	for _, p := range []*Process{c.ControllerManager, c.Scheduler, c.APIServer, c.Etcd} {
		p.Kill()
	}
}

// Ready waits until the API server is ready.
func (c *Cluster) Ready() error {
	return node.Until(readiness, func() error {
		if err := errors.Join(c.Etcd.Running(), c.APIServer.Running()); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		response, err := c.Admin.open(ctx, "GET", "/readyz", "", nil)
		if err != nil {
			return err
		}
		return response.Body.Close()
	})
}

// Restart kills the API server and starts it again.
func (c *Cluster) Restart() error {
	c.APIServer.Kill()
	if err := c.APIServer.Start(); err != nil {
		return err
	}
	return c.Ready()
}

// Snapshot copies the data of etcd, as of now, to a directory.
func (c *Cluster) Snapshot(to string) error {
	// A copy of the files of a stopped process is as good as those after a crash.
	c.Etcd.Pause()
	defer c.Etcd.Resume()
	return os.CopyFS(to, os.DirFS(c.etcdData()))
}

// Restore replaces the data of etcd by a snapshot, and restarts etcd and the
// API server. Resource versions are then lower than before.
func (c *Cluster) Restore(from string) error {
	c.APIServer.Kill()
	c.Etcd.Kill()
	if err := os.RemoveAll(c.etcdData()); err != nil {
		return err
	}
	if err := os.CopyFS(c.etcdData(), os.DirFS(from)); err != nil {
		return err
	}
	if err := os.Chmod(c.etcdData(), 0o700); err != nil {
		return err
	}
	if err := errors.Join(c.Etcd.Start(), c.APIServer.Start()); err != nil {
		return err
	}
	return c.Ready()
}

// ClientCertificate issues a user's certificate to NAME.crt and NAME.key.
func (c *Cluster) ClientCertificate(name string, subject Subject) (User, error) {
	files, err := c.Authority.Issue(name, subject)
	return User{Name: name, Files: files}, err
}

// Node returns the identity of a kubelet, valid for a time, or a year if that is zero.
func (c *Cluster) Node(name string, validity time.Duration) (User, error) {
	return c.ClientCertificate("node-"+name, Subject{
		User: "system:node:" + name, Groups: []string{"system:nodes"}, Validity: validity,
	})
}

// ServiceAccountToken requests a token and writes it to a file. It is bound to
// a node or pod unless the object is nil.
func (c *Cluster) ServiceAccountToken(namespace, account string, validity time.Duration, bound Object) (User, error) {
	spec := Object{"expirationSeconds": int(validity.Seconds())}
	if bound != nil {
		spec["boundObjectRef"] = Object{"apiVersion": "v1", "kind": bound.Text("kind"), "name": bound.Name(), "uid": bound.UID()}
	}
	answer, err := c.Admin.Create(
		"/api/v1/namespaces/"+namespace+"/serviceaccounts/"+account+"/token",
		Object{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec})
	if err != nil {
		return User{}, err
	}
	name := "account-" + account
	if bound != nil {
		name += "-" + bound.Name()
	}
	file := filepath.Join(c.Dir, "pki", name+".token")
	return User{Name: name, Token: file}, Replace(file, []byte(answer.Text("status", "token")))
}

// Client returns a client with a user's rights. It reads the user's files once.
func (c *Cluster) Client(user User) (*Client, error) { return newClient(c.Server, c.Authority, user) }

// Kubeconfig writes a kubeconfig that names the user's files, and returns its path.
func (c *Cluster) Kubeconfig(user User) (string, error) { return c.KubeconfigFor(c.Server, user) }

// KubeconfigFor is Kubeconfig for another URL of the API server.
func (c *Cluster) KubeconfigFor(server string, user User) (string, error) {
	identity := map[string]any{"client-certificate": user.Cert, "client-key": user.Key}
	if user.Token != "" {
		identity = map[string]any{"tokenFile": user.Token}
	}
	config, err := json.MarshalIndent(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "test",
		"clusters": []any{map[string]any{"name": "test", "cluster": map[string]any{
			"server": server, "certificate-authority": c.Authority.File,
		}}},
		"users":    []any{map[string]any{"name": user.Name, "user": identity}},
		"contexts": []any{map[string]any{"name": "test", "context": map[string]any{"cluster": "test", "user": user.Name}}},
	}, "", " ")
	if err != nil {
		return "", err
	}
	path := filepath.Join(c.Dir, user.Name+".kubeconfig")
	return path, Replace(path, config)
}

// Kubectl runs kubectl as admin and returns its output.
func (c *Cluster) Kubectl(input string, args ...string) ([]byte, error) {
	args = append([]string{"--kubeconfig", c.AdminConfig, "--cache-dir", filepath.Join(c.Dir, "kubectl")}, args...)
	command := exec.Command(filepath.Join(c.Bin, "kubectl"), args...)
	command.Stdin = strings.NewReader(input)
	out, err := command.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("kubectl %s: %w: %s", strings.Join(args[4:], " "), err, exit.Stderr)
	}
	return out, err
}

// Apply creates or changes the objects of a YAML manifest.
func (c *Cluster) Apply(manifest string) error {
	_, err := c.Kubectl(manifest, "apply", "--server-side", "--force-conflicts", "-f", "-")
	return err
}

// ServeTomorrow serves TLS with a certificate that is valid only from tomorrow
// on, and returns its URL. It answers no request.
func (c *Cluster) ServeTomorrow() (stop func(), url string, err error) {
	files, err := c.Authority.Issue("tomorrow", Subject{
		User: "kube-apiserver", Hosts: []string{"127.0.0.1"}, From: time.Now().Add(24 * time.Hour),
	})
	if err != nil {
		return nil, "", err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, "", err
	}
	server := &http.Server{ErrorLog: log.New(io.Discard, "", 0)}
	go server.ServeTLS(listener, files.Cert, files.Key)
	return func() { server.Close() }, "https://" + listener.Addr().String(), nil
}

// freePorts returns ports outside the range that Linux uses for outgoing
// connections, so that they are still free when a server is started again.
func freePorts(count int) ([]string, error) {
	var ports []string
	var open []net.Listener
	defer func() {
		for _, listener := range open {
			listener.Close()
		}
	}()
	for range 1000 {
		if len(ports) == count {
			return ports, nil
		}
		port := strconv.Itoa(10_000 + rand.IntN(20_000))
		if listener, err := net.Listen("tcp", "127.0.0.1:"+port); err == nil {
			open, ports = append(open, listener), append(ports, port)
		}
	}
	return nil, errors.New("there are no free ports")
}
