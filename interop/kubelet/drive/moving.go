package main

import (
	"errors"
	"fmt"
	"path/filepath"

	"devlet.test/interop/kubernetes/cluster"
)

// moves put devlet between the kubelet and the plugins, and take it away again.
var moves = []scenario{
	{name: "move", run: move, bare: true, moves: true},
}

// move adopts a bare node while pods run, and leaves it.
func move(t *T) {
	const kind = "move"
	p := t.plugin(kind, 6)
	wants := map[string]int{kind: 1}
	running := map[string]instance{}
	create := func(what, name string) {
		t.create(pod{name: name, wants: wants})
		i, err := t.holding(name, soon)
		t.Must(what+": a pod gets a device", err)
		running[name] = i
		t.Check(what+": no device is open twice", none(violations()))
	}
	lasting := func(what string) {
		var failed error
		for name, before := range running {
			failed = errors.Join(failed, same(t, name, before))
		}
		t.Check(what+": the pods run on", failed)
	}
	restart := func(what, name string) {
		t.ok(killContainer(running[name]))
		again, err := t.restarted(running[name])
		t.Must(what+": a killed container runs again with its device", errors.Join(err, equal("devices", again.open, running[name].open)))
		running[name] = again
	}
	create("before", "bare-1")
	create("before", "bare-2")
	// It leaves its checkpoint last written by a pod that is gone.
	t.create(pod{name: "gone", wants: wants})
	_, err := t.holding("gone", soon)
	t.Must("before: a pod that will be gone gets a device", err)
	t.remove("gone", 0)
	t.ok(idleExcept(kind, "bare-1", "bare-2"))

	_, err = t.m.ask("shield", "check")
	t.Check("check accepts the node", err)
	t.m.shield = true
	t.cleanup(func() { t.m.devlet.Kill(); t.m.shield = false })
	t.Must("devlet starts beside the kubelet", t.m.startDevlet())
	out, err := t.m.ask("shield", "adopt")
	t.Must("adopt takes the node over", err)
	fmt.Println(out)
	lasting("adopted")
	moved := p.moveTo(t.m.pluginDir())
	t.cleanup(moved.Kill)
	t.Must("the plugin registers with devlet", p.called("ListAndWatch", 2))
	t.Must("the node offers its devices", errors.Join(t.m.ready(), p.offered(6)))
	lasting("the plugin has moved")
	create("adopted", "shield-1")
	restart("adopted", "bare-1")
	restart("adopted", "shield-1")
	lasting("adopted, containers restarted")

	out, err = t.m.ask("shield", "leave")
	t.Must("leave hands the node back", err)
	fmt.Println(out)
	lasting("left")
	moved.Kill()
	t.m.devlet.Kill()
	t.m.shield = false
	t.ok(p.Start())
	t.Must("the plugin is back at the kubelet", p.called("ListAndWatch", 3))
	t.Must("the node offers its devices again", errors.Join(t.m.ready(), p.offered(6)))
	create("left", "bare-3")
	restart("left", "bare-2")
	restart("left", "shield-1")
	lasting("left, containers restarted")
	t.m.kubelet.Kill()
	t.ok(t.m.restartKubelet())
	t.Must("the kubelet is restarted", t.m.ready())
	lasting("the kubelet is restarted")
}

// moveTo stops the plugin and starts it with another directory of sockets.
func (p *plugin) moveTo(dir string) *cluster.Process {
	p.Kill()
	args := append([]string{
		"--dir=" + dir, "--resource=" + p.resource, fmt.Sprintf("--devices=%d", p.devices), "--files=" + p.files,
	}, p.flags...)
	moved := cluster.NewProcess(filepath.Join(p.m.dir, "logs"), filepath.Join(*plugins, "plugin-scripted"), args...)
	moved.Log = p.Log
	if err := moved.Start(); err != nil {
		panic(err)
	}
	return moved
}
