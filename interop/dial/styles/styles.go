// Package styles calls a server over connections dialled in different ways.
package styles

import (
	"fmt"
	"os"
)

// Calls is the number of calls on each connection: the later calls refer to the header table.
const Calls = 50

// Style is one way to dial a socket.
type Style struct {
	Name string
	// Dial connects, and returns a function that calls the server once and one that closes the connection.
	Dial func(socket string) (call func() error, done func() error, err error)
}

// Run tries every style on the socket in the first argument and prints one line for each.
func Run(prefix string, all []Style) {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: "+os.Args[0]+" SOCKET")
		os.Exit(2)
	}
	failed := false
	for _, style := range all {
		if err := style.try(os.Args[1]); err != nil {
			failed = true
			fmt.Printf("%s %s: %v\n", prefix, style.Name, err)
		} else {
			fmt.Printf("%s %s: ok\n", prefix, style.Name)
		}
	}
	if failed {
		os.Exit(1)
	}
}

func (style Style) try(socket string) error {
	call, done, err := style.Dial(socket)
	if err != nil {
		return fmt.Errorf("dial: %w", err)
	}
	defer done()
	for count := range Calls {
		if err := call(); err != nil {
			return fmt.Errorf("call %d: %w", count+1, err)
		}
	}
	return nil
}
