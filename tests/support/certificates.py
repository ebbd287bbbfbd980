"""Certificates made in tests: an authority, and what it signs."""

import ssl
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Authority:
    """Signs certificates; its own is `path`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._folder = folder
        self.path = folder / f"{name}.pem"
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        made = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        self._write(self.path, made.add_extension(usage, critical=True))

    def _builder(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, last_day: datetime = datetime(2099, 1, 1)
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime(2020, 1, 1))
            .not_valid_after(last_day)
            # From Python 3.13 on, a certificate without these two is refused.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )

    def _write(self, path: Path, builder: x509.CertificateBuilder) -> None:
        path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        uris: tuple[str, ...] = (),
        dns_names: tuple[str, ...] = (),
        last_day: datetime = datetime(2099, 1, 1),
    ) -> tuple[Path, Path]:
        """Write a certificate for `name` on this machine, and its key; the files have the same names every time."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
        names += [x509.DNSName(host) for host in (*dns_names, "localhost")]
        names.append(x509.IPAddress(ip_address("127.0.0.1")))
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        made = self._builder(subject, key, last_day).add_extension(x509.SubjectAlternativeName(names), critical=False)
        cert_path, key_path = self._folder / f"{name}.cert", self._folder / f"{name}.key"
        self._write(cert_path, made)
        key_path.touch(mode=0o600)
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cert_path, key_path

    def client_context(self, identity: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """The context of a client that trusts this authority."""
        context = ssl.create_default_context(cafile=str(self.path))
        if identity is not None:
            context.load_cert_chain(*identity)
        return context
