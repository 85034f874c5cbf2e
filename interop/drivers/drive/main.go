// Command drive starts devlet and DRA drivers in Go, admits pods with claims,
// and restarts devlet under the drivers. Arguments: devlet, and the directory
// of the drivers' programs.
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
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"devlet.test/interop/events"
	"devlet.test/interop/node"
)

// flavour is a kind of driver.
type flavour struct {
	name    string
	program string
	args    []string
	// service is the service that devlet should choose, method its prefix on the wire.
	service, method string
	// prepares and unprepares are the calls that it reports.
	prepares, unprepares string
	// asksForClaims: it needs the claim objects.
	asksForClaims bool
	// rolls: another plugin of the same name can be started beside it.
	rolls bool
	// healthy and ill are its health values; empty if it does not report health.
	healthy, ill string
}

const driverName = "drivers.devlet.dev"

var flavours = []flavour{
	bindings("v1", "v1.DRAPlugin,v1beta1.DRAPlugin,v1.DRAResourceHealth,v1alpha1.DRAResourceHealth"),
	bindings("v1beta1", "v1beta1.DRAPlugin,v1alpha1.DRAResourceHealth"),
	helper("v1"),
	helper("v1beta1", "-v1=false"),
	{
		name: "helper of 1.31", program: "driver-helper-1-31", service: "v1alpha3.Node",
		method:     "/v1alpha3.Node/NodePrepareResources",
		prepares:   "/v1alpha3.Node/NodePrepareResources",
		unprepares: "/v1alpha3.Node/NodeUnprepareResources",
	},
}

func method(service string) string { return "/k8s.io.kubelet.pkg.apis.dra." + service + ".DRAPlugin/" }

func bindings(service, services string) flavour {
	return flavour{
		name: "bindings " + service, program: "driver-bindings", args: []string{"-services", services},
		service: service + ".DRAPlugin", method: method(service) + "NodePrepareResources",
		prepares: method(service) + "NodePrepareResources", unprepares: method(service) + "NodeUnprepareResources",
		healthy: "HEALTHY", ill: "UNHEALTHY",
	}
}

func helper(service string, args ...string) flavour {
	return flavour{
		name: "helper " + service, program: "driver-helper", args: args,
		service: service + ".DRAPlugin", method: method(service) + "NodePrepareResources",
		prepares: "PrepareResourceClaims", unprepares: "UnprepareResourceClaims", asksForClaims: true, rolls: true,
		healthy: "Healthy", ill: "Unhealthy",
	}
}

var results node.Results

func main() {
	devlet, programs := os.Args[1], os.Args[2]
	for _, f := range flavours {
		root, err := os.MkdirTemp("", "drivers")
		if err != nil {
			panic(err)
		}
		s := scenario{flavour: f, devlet: devlet, programs: programs, root: root}
		s.run()
		if s.driver != nil {
			s.driver.stop()
		}
		if s.node != nil {
			s.node.Kill()
		}
		os.RemoveAll(root)
	}
	results.End()
}

// scenario is a test of one driver with one node.
type scenario struct {
	flavour
	devlet, programs, root string

	node   *node.Node
	driver *driver
}

func (s *scenario) check(what string, err error) bool {
	if err != nil && s.driver != nil {
		err = fmt.Errorf("%w; the driver reported %v and logged %s", err, s.driver.all(), &s.driver.log)
	}
	return results.Check(s.name+": "+what, err)
}

func (s *scenario) run() {
	var err error
	if s.node, err = node.Start(s.devlet, s.root); !s.check("devlet starts", err) {
		return
	}
	if s.driver, err = s.start(); !s.check("the driver starts", err) {
		return
	}
	if !s.check("the driver registers", s.registered()) {
		return
	}
	s.check("devlet chooses the newest common service", s.chosen())

	claim := s.claim("widget", "first", "second")
	first := s.pod("first", "widget")
	admitted, err := s.admit(first, claim)
	if !s.check("a pod with a claim is admitted", err) {
		return
	}
	s.check("the claim is prepared by that service", s.driver.called(s.method))
	s.check("the claim is prepared once", s.driver.count(s.prepares, "uid-widget", 1))
	s.check("the pod has the claim's device", has(admitted, "widget"))

	again, err := s.admit(first, claim)
	if err == nil {
		err = same(again, admitted)
	}
	s.check("the same pod gets the same device again", err)
	second, err := s.admit(s.pod("second", "widget"), claim)
	if err == nil {
		err = has(second, "widget")
	}
	s.check("another pod shares the claim", err)
	s.check("and no driver is called for that", s.driver.count(s.prepares, "uid-widget", 1))

	if !s.check("devlet restarts", s.restart()) {
		return
	}
	s.check("the driver registers again", s.registered())
	again, err = s.admit(first, claim)
	if err == nil {
		err = same(again, admitted)
	}
	s.check("the pod still has its device", err)
	s.check("and no driver is called for that either", s.driver.count(s.prepares, "uid-widget", 1))

	if s.ill != "" {
		s.check("the driver's health is received", s.health("widget", s.ill, " unhealthy: set by command"))
		s.check("and received again", s.health("widget", s.healthy, " healthy: set by command"))
	}

	if s.asksForClaims {
		s.check("the claim object is deleted", s.driver.command("forget", "default", "widget"))
	}
	_, err = s.node.Run("remove", "first")
	s.check("a pod of a shared claim is removed", err)
	s.check("the claim stays prepared", s.driver.count(s.unprepares, "uid-widget", 0))
	_, err = s.node.Run("remove", "second")
	s.check("the last pod of it is removed", err)
	s.check("the claim is unprepared once", s.driver.count(s.unprepares, "uid-widget", 1))

	if s.rolls {
		s.rollingUpdate()
	}

	s.driver.stop()
	s.check("the driver stops", s.until(false))
	late := s.claim("late", "late")
	waiting := make(chan error, 1)
	go func() {
		_, err := s.node.AdmitFiles(s.pod("late", "late"), late)
		waiting <- err
	}()
	if s.driver, err = s.start(); !s.check("the driver starts again", err) {
		return
	}
	if s.asksForClaims {
		s.check("the claim object exists", s.driver.command("claim", late))
	}
	s.check("and registers", s.registered())
	s.check("the pod that waited for it is admitted", <-waiting)
	_, err = s.node.Run("remove", "late")
	s.check("the pod is removed", err)
	s.check("its claim is unprepared", s.driver.count(s.unprepares, "uid-late", 1))
	s.check("devlet stops", s.node.Stop())
	s.node = nil
}

// rollingUpdate starts another plugin of the driver, and stops the first. The new one prepares and
// unprepares the pod in between.
func (s *scenario) rollingUpdate() {
	old := s.driver
	var err error
	if s.driver, err = s.start("-rolling-update", "uid-of-the-new-one"); !s.check("another plugin of the driver starts", err) {
		s.driver = old
		return
	}
	s.check("it registers beside the old one", errors.Join(s.registered(), s.plugins(2)))
	_, err = s.admit(s.pod("between", "between"), s.claim("between", "between"))
	s.check("a pod is admitted meanwhile", err)
	s.check("the newer one is called", errors.Join(
		s.driver.count(s.prepares, "uid-between", 1), old.count(s.prepares, "uid-between", 0)))
	old.stop()
	s.check("the old one stops", node.Until(30*time.Second, func() error { return s.plugins(1) }))
	_, err = s.node.Run("remove", "between")
	s.check("the pod is removed", err)
	s.check("its claim is unprepared", s.driver.count(s.unprepares, "uid-between", 1))
}

// plugins checks the number of the driver's plugins.
func (s *scenario) plugins(wanted int) error {
	view, err := s.view()
	if err == nil && len(view.Plugins) != wanted {
		err = fmt.Errorf("devlet reports %+v", view)
	}
	return err
}

func (s *scenario) restart() error {
	if err := s.node.Stop(); err != nil {
		return err
	}
	s.driver.forget("Registration")
	var err error
	s.node, err = node.Start(s.devlet, s.root)
	return err
}

// registered waits until devlet has confirmed the registration and can call the driver.
func (s *scenario) registered() error {
	return errors.Join(
		node.Until(30*time.Second, func() error {
			return s.driver.called("/pluginregistration.Registration/NotifyRegistrationStatus")
		}),
		s.until(true),
	)
}

type driverView struct {
	Name    string
	Plugins []struct {
		Service   string
		Connected bool
	}
}

func (s *scenario) view() (driverView, error) {
	var all struct{ Drivers []driverView }
	if err := s.node.Ask(&all, "get", "drivers"); err != nil {
		return driverView{}, err
	}
	for _, d := range all.Drivers {
		if d.Name == driverName {
			return d, nil
		}
	}
	return driverView{}, nil
}

// until waits until the driver is connected, or disconnected.
func (s *scenario) until(connected bool) error {
	return node.Until(30*time.Second, func() error {
		view, err := s.view()
		if err != nil {
			return err
		}
		for _, plugin := range view.Plugins {
			if plugin.Connected == connected {
				return nil
			}
		}
		if len(view.Plugins) == 0 && !connected {
			return nil
		}
		return fmt.Errorf("devlet reports %+v", view)
	})
}

func (s *scenario) chosen() error {
	view, err := s.view()
	if err == nil && (len(view.Plugins) != 1 || view.Plugins[0].Service != s.service) {
		err = fmt.Errorf("devlet reports %+v, not %s", view, s.service)
	}
	return err
}

// health sets the health of a device in the driver, and waits until the pods show it.
func (s *scenario) health(device, value, shown string) error {
	if err := s.driver.command("health", device, value); err != nil {
		return err
	}
	return node.Until(30*time.Second, func() error {
		out, err := s.node.Run("describe", "pod", "first")
		if err == nil && !strings.Contains(string(out), shown) {
			err = fmt.Errorf("the pod is described as\n%s", out)
		}
		return err
	})
}

// claim writes an allocated claim, and passes it to the driver if it needs it.
func (s *scenario) claim(name string, pods ...string) string {
	reserved := ""
	for _, pod := range pods {
		reserved += fmt.Sprintf("  - {resource: pods, name: %s, uid: uid-%s}\n", pod, pod)
	}
	path := s.write("claim-"+name, fmt.Sprintf(`apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %s, namespace: default, uid: uid-%s}
spec:
  devices:
    requests:
    - {name: one, exactly: {deviceClassName: widgets}}
status:
  reservedFor:
%s  allocation:
    devices:
      results:
      - {request: one, driver: %s, pool: pool, device: %s}
`, name, name, reserved, driverName, name))
	return path
}

func (s *scenario) pod(name, claim string) string {
	return s.write("pod-"+name, fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: default, uid: uid-%s}
spec:
  resourceClaims:
  - {name: device, resourceClaimName: %s}
  containers:
  - name: main
    resources: {claims: [{name: device}]}
`, name, name, claim))
}

func (s *scenario) write(name, text string) string {
	path := filepath.Join(s.root, name+".yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		panic(err)
	}
	return path
}

func (s *scenario) admit(pod, claim string) (node.Pod, error) {
	if s.asksForClaims {
		if err := s.driver.command("claim", claim); err != nil && !strings.Contains(err.Error(), "already exists") {
			return node.Pod{}, err
		}
	}
	return s.node.AdmitFiles(pod, claim)
}

// has checks that a pod has a claim's device, and its container the CDI name.
func has(pod node.Pod, device string) error {
	wanted := []node.Claim{{
		Name: device, Namespace: "default", UID: "uid-" + device,
		Drivers: []node.ClaimDriver{{Name: driverName}},
	}}
	got := slices.Clone(pod.Claims)
	for i := range got {
		for j := range got[i].Drivers {
			if len(got[i].Drivers[j].Devices) != 1 {
				return fmt.Errorf("the claims are %+v", pod.Claims)
			}
			got[i].Drivers = slices.Clone(got[i].Drivers)
			got[i].Drivers[j].Devices = nil
		}
	}
	if !reflect.DeepEqual(got, wanted) {
		return fmt.Errorf("the claims are %+v", pod.Claims)
	}
	if cdi := []string{"interop.devlet.dev/widget=" + device}; !slices.Equal(pod.Containers[0].CDIDevices, cdi) {
		return fmt.Errorf("the CDI devices are %v, not %v", pod.Containers[0].CDIDevices, cdi)
	}
	return nil
}

func same(got, want node.Pod) error {
	if !reflect.DeepEqual(got, want) {
		return fmt.Errorf("it is %+v, not %+v", got, want)
	}
	return nil
}

// driver is a running driver.
type driver struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	log   node.Log
	// answers are the answers to commands.
	answers chan events.Event

	mu     sync.Mutex
	events []events.Event
}

func (s *scenario) start(more ...string) (*driver, error) {
	args := slices.Concat([]string{"-root", s.root, "-driver", driverName}, s.args, more)
	d := &driver{cmd: exec.Command(filepath.Join(s.programs, s.program), args...), answers: make(chan events.Event, 1)}
	d.cmd.Stderr = &d.log
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var err error
	if d.stdin, err = d.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := d.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := d.cmd.Start(); err != nil {
		return nil, err
	}
	go d.listen(stdout)
	return d, nil
}

func (d *driver) listen(stdout io.Reader) {
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		var e events.Event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			continue
		}
		if e.Call == "done" || e.Call == "refused" {
			d.answers <- e
			continue
		}
		d.mu.Lock()
		d.events = append(d.events, e)
		d.mu.Unlock()
	}
}

func (d *driver) all() []events.Event {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.events)
}

// called checks that a call was received.
func (d *driver) called(call string) error {
	for _, e := range d.all() {
		if e.Call == call {
			return nil
		}
	}
	return fmt.Errorf("%s was not called", call)
}

// forget discards the received calls of a service.
func (d *driver) forget(service string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.events = slices.DeleteFunc(d.events, func(e events.Event) bool { return strings.Contains(e.Call, service) })
}

// count checks how many calls named a claim.
func (d *driver) count(call, claim string, wanted int) error {
	found := 0
	for _, e := range d.all() {
		if e.Call == call && slices.Contains(e.Claims, claim) {
			found++
		}
	}
	if found != wanted {
		return fmt.Errorf("%s has named %s %d times, not %d", call, claim, found, wanted)
	}
	return nil
}

// command sends a command and waits for its answer.
func (d *driver) command(words ...string) error {
	if _, err := fmt.Fprintln(d.stdin, strings.Join(words, " ")); err != nil {
		return err
	}
	select {
	case e := <-d.answers:
		if e.Call == "refused" {
			return errors.New(e.Text)
		}
		return nil
	case <-time.After(30 * time.Second):
		return errors.New("the driver does not answer")
	}
}

// stop ends the driver, which removes its sockets.
func (d *driver) stop() {
	d.stdin.Close()
	kill := time.AfterFunc(10*time.Second, func() { d.cmd.Process.Kill() })
	defer kill.Stop()
	d.cmd.Wait()
}
