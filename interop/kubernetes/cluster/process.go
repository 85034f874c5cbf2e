package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// Process is a program that can be killed and started again. Its output is
// appended to one log file.
type Process struct {
	Name string
	// Log is the path of the log file.
	Log string

	path string
	args []string

	cmd   *exec.Cmd
	ended chan struct{}
	exit  error
}

// NewProcess returns a process that is not started yet.
func NewProcess(dir, path string, args ...string) *Process {
	name := filepath.Base(path)
	return &Process{Name: name, Log: filepath.Join(dir, name+".log"), path: path, args: args}
}

// Start starts the process, again if it has ended.
func (p *Process) Start() error {
	log, err := os.OpenFile(p.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	p.cmd = exec.Command(p.path, p.args...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	p.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) {
		p.exit = cmd.Wait()
		close(ended)
	}(p.cmd, p.ended)
	return nil
}

// Running returns an error with the end of the log if the process has ended.
func (p *Process) Running() error {
	if p.cmd == nil {
		return fmt.Errorf("%s is not started", p.Name)
	}
	select {
	case <-p.ended:
		return fmt.Errorf("%s has ended (%v); its log ends with\n%s", p.Name, p.exit, tail(p.Log))
	default:
		return nil
	}
}

// Kill ends the process as in a crash.
func (p *Process) Kill() {
	if p.cmd != nil {
		p.cmd.Process.Kill()
		<-p.ended
	}
}

// Stop stops the process with SIGTERM, and kills it if it does not stop.
func (p *Process) Stop() error {
	if err := p.Running(); err != nil {
		return err
	}
	p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.ended:
		return nil
	case <-time.After(20 * time.Second):
		p.Kill()
		return fmt.Errorf("%s does not stop", p.Name)
	}
}

// Pause stops the process from running until Resume.
func (p *Process) Pause() { p.cmd.Process.Signal(syscall.SIGSTOP) }

// Resume lets a paused process run.
func (p *Process) Resume() { p.cmd.Process.Signal(syscall.SIGCONT) }

// Resident returns the resident memory in bytes.
func (p *Process) Resident() (int64, error) { return Resident(p.cmd.Process.Pid) }

// Resident returns the resident memory of a process in bytes.
func Resident(pid int) (int64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(status) {
		var kib int64
		if n, _ := fmt.Sscanf(string(line), "VmRSS: %d kB", &kib); n == 1 {
			return kib << 10, nil
		}
	}
	return 0, errors.New("VmRSS is missing")
}

// tail returns the last lines of a log.
func tail(path string) []byte {
	text, err := os.ReadFile(path)
	if err != nil {
		return []byte(err.Error())
	}
	const length = 2000
	if len(text) > length {
		text = text[len(text)-length:]
	}
	return text
}
