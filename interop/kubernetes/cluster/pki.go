package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Authority is a certificate authority whose files are in one directory.
type Authority struct {
	// File is the path of its certificate.
	File string

	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// Subject is the content of a certificate.
type Subject struct {
	User   string
	Groups []string
	// Hosts are the names and addresses of a server; a client has none.
	Hosts []string
	// From is the start of the validity, now if it is zero.
	From time.Time
	// Validity is a year if it is zero.
	Validity time.Duration
}

// Files are the paths of a certificate and its key.
type Files struct{ Cert, Key string }

// NewAuthority creates an authority.
func NewAuthority(dir string) (*Authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := certificate(Subject{User: "test-ca"})
	template.IsCA, template.BasicConstraintsValid, template.ExtKeyUsage = true, true, nil
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	a := &Authority{File: filepath.Join(dir, "ca.crt"), dir: dir, cert: cert, key: key}
	return a, writePEM(a.File, "CERTIFICATE", der)
}

// Issue writes a certificate and its key to NAME.crt and NAME.key. Both files
// are replaced, the key first.
func (a *Authority) Issue(name string, subject Subject) (Files, error) {
	files := Files{Cert: filepath.Join(a.dir, name+".crt"), Key: filepath.Join(a.dir, name+".key")}
	key, err := writeKey(files.Key)
	if err != nil {
		return files, err
	}
	der, err := x509.CreateCertificate(rand.Reader, certificate(subject), a.cert, key.Public(), a.key)
	if err != nil {
		return files, err
	}
	return files, writePEM(files.Cert, "CERTIFICATE", der)
}

func certificate(s Subject) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if s.Validity == 0 {
		s.Validity = 365 * 24 * time.Hour
	}
	if s.From.IsZero() {
		s.From = time.Now()
	}
	cert := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: s.User, Organization: s.Groups},
		// Certificates have whole seconds.
		NotBefore:   s.From.Add(-time.Second),
		NotAfter:    s.From.Add(s.Validity),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	for _, host := range s.Hosts {
		cert.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		if ip := net.ParseIP(host); ip != nil {
			cert.IPAddresses = append(cert.IPAddresses, ip)
		} else {
			cert.DNSNames = append(cert.DNSNames, host)
		}
	}
	return cert
}

// writeKey creates a private key, which also signs tokens of ServiceAccounts.
func writeKey(path string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, writePEM(path, "EC PRIVATE KEY", der)
}

func writePublicKey(path string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	return writePEM(path, "PUBLIC KEY", der)
}

func writePEM(path, kind string, der []byte) error {
	return Replace(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
}

// Replace writes a file at once, as tools that rotate certificates and tokens do.
func Replace(path string, content []byte) error {
	if err := os.WriteFile(path+".new", content, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
