//! HTTPS with another implementation's certificates and client: OpenSSL's, and Python's `ssl` over it.
#![allow(clippy::unwrap_used)]

mod common;

use common::{command, muser, tiny};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Asks for each protocol version, then speaks plain HTTP, then asks while a client that never speaks is connected.
const CLIENT: &str = r#"
import http.client, json, socket, ssl, sys
port, ca = int(sys.argv[1]), sys.argv[2]
def ask(version, method, path, body=None):
    context = ssl.create_default_context(cafile=ca)
    context.minimum_version = context.maximum_version = version
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
    connection.request(method, path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200, (answer.status, text)
    return text, connection.sock
for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
    assert json.loads(ask(version, "GET", "/health")[0])["status"] == "ok"
body = json.dumps({"prompt": "a", "max_tokens": 40, "stream": True})
assert ask(version, "POST", "/v1/completions", body)[0].endswith("data: [DONE]\n\n")
plain = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
try:
    plain.request("GET", "/health")
    raise AssertionError(plain.getresponse().status)
except (http.client.HTTPException, OSError):
    pass
silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
assert ask(version, "GET", "/health")[0]
try:
    http.client.HTTPSConnection("127.0.0.1", port, context=ssl.create_default_context(), timeout=30).request("GET", "/")
    raise AssertionError("a certificate that nobody vouches for was taken")
except ssl.SSLCertVerificationError:
    pass
"#;

fn certificate(folder: &Path, name: &str) -> (String, String) {
    let file = |ending: &str| folder.join(format!("{name}.{ending}")).to_str().unwrap().to_string();
    let (cert, key) = (file("crt"), file("key"));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
        .args(["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"])
        .args(["-keyout", &key, "-out", &cert])
        .output()
        .expect("this test needs the openssl program");
    assert!(made.status.success(), "{made:?}");
    (cert, key)
}

/// Stops the server whatever happens to the test.
struct Stop(Child);

impl Drop for Stop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn https() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tls");
    std::fs::create_dir_all(&folder).unwrap();
    let ((cert, key), (other, _)) = (certificate(&folder, "one"), certificate(&folder, "two"));
    let model = tiny();
    let serve = ["serve", "-m", &model, "--port", "0", "--log", "off"];
    let with = |cert: &str, key: &str| {
        let tls = ["--tls-cert", cert, "--tls-key", key].map(String::from);
        serve.map(String::from).into_iter().chain(tls).collect::<Vec<_>>()
    };
    for (cert, key, named) in [
        ("/nowhere.crt", &*key, "/nowhere.crt"),
        (&*cert, "/nowhere.key", "/nowhere.key"),
        (&*key, &*key, "one.key"),
        (&*cert, &*cert, "one.crt"),
        // A key of another certificate.
        (&*other, &*key, "one.key"),
    ] {
        let arguments = with(cert, key);
        let error = muser(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).error(1);
        assert!(error.contains(named) && error.contains("TLS"), "{error}");
    }
    let arguments = with(&cert, &key);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut server = Stop(command(&arguments).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let port = line.trim().strip_prefix("listening on https://127.0.0.1:").unwrap();
    let client = Command::new("python3").args(["-c", CLIENT, port, &cert]).output().unwrap();
    assert!(client.status.success(), "{}", String::from_utf8_lossy(&client.stderr));
}
