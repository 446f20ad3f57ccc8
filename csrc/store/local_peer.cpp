#include "store/local_peer.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <system_error>

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/errors.h"

namespace noria {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kLongest{INT_MAX};  // the limit of poll: 24 days
constexpr long kPidfdOpen = 434;           // on every architecture; headers before Linux 5.3 do not name it
constexpr std::size_t kMostDescriptors = 4;

struct SocketAddress {
  sockaddr_un address{};
  socklen_t size;

  // A name that begins with a zero byte belongs to no file.
  explicit SocketAddress(const std::string& name) {
    NORIA_INVARIANT(name.size() < sizeof address.sun_path, "too long a name for a socket");
    address.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), address.sun_path + 1);
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

Descriptor make_socket(int flags) {
  Descriptor made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
  if (!made) refuse_to_share("socket");
  return made;
}

}  // namespace

void refuse_to_share(const std::string& call) {
  throw MachineError(call + " failed between processes: " + std::generic_category().message(errno));
}

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

Deadline::Deadline(milliseconds timeout) : end_(steady_clock::now() + std::clamp(timeout, milliseconds{0}, kLongest)) {}

int Deadline::left_ms() const {
  const auto left = std::chrono::ceil<milliseconds>(end_ - steady_clock::now());
  return static_cast<int>(std::clamp(left, milliseconds{0}, kLongest).count());
}

void wait(std::vector<pollfd> watched, const Deadline& deadline) {
  while (poll(watched.data(), watched.size(), deadline.left_ms()) < 0) {
    if (errno != EINTR) refuse_to_share("poll");
  }
}

std::string random_name() {
  std::array<unsigned char, 16> drawn{};
  if (getrandom(drawn.data(), drawn.size(), 0) != static_cast<ssize_t>(drawn.size())) refuse_to_share("getrandom");
  std::string name;
  for (const unsigned char byte : drawn) {
    name += static_cast<char>('a' + byte / 16);
    name += static_cast<char>('a' + byte % 16);
  }
  return name;
}

Descriptor listen_as(const std::string& name) {
  Descriptor listener = make_socket(SOCK_NONBLOCK);
  const SocketAddress address(name);
  if (bind(listener.number(), address.get(), address.size) != 0) refuse_to_share("bind");
  if (listen(listener.number(), SOMAXCONN) != 0) refuse_to_share("listen");
  return listener;
}

Peer::Peer(Descriptor connection, int pid)
    : connection_(std::move(connection)),
      process_(static_cast<int>(syscall(kPidfdOpen, pid, 0))),
      has_ended_(!process_ && errno == ESRCH) {}

std::optional<Peer> Peer::of(Descriptor connection) {
  ucred other{};
  socklen_t size = sizeof other;
  if (getsockopt(connection.number(), SOL_SOCKET, SO_PEERCRED, &other, &size) != 0) {
    refuse_to_share("getsockopt(SO_PEERCRED)");
  }
  if (other.uid != geteuid()) return std::nullopt;
  return Peer(std::move(connection), other.pid);
}

std::optional<Peer> Peer::accept(const Descriptor& listener) {
  while (true) {
    Descriptor connection(accept4(listener.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (connection) {
      if (auto peer = of(std::move(connection))) return peer;
    } else if (errno == EAGAIN) {
      return std::nullopt;
    } else if (errno != EINTR && errno != ECONNABORTED) {
      refuse_to_share("accept4");
    }
  }
}

std::optional<Peer> Peer::connect(const std::string& name, milliseconds timeout) {
  Descriptor connection = make_socket(0);
  // poll does not report a free place in the queue, so the socket's own timeout is used.
  const int longest_ms = Deadline(timeout).left_ms();
  const timeval longest{longest_ms / 1000, std::max(1, longest_ms % 1000 * 1000)};  // 0 would mean no timeout
  if (setsockopt(connection.number(), SOL_SOCKET, SO_SNDTIMEO, &longest, sizeof longest) != 0) {
    refuse_to_share("setsockopt(SO_SNDTIMEO)");
  }
  const SocketAddress address(name);
  while (::connect(connection.number(), address.get(), address.size) != 0) {
    if (errno != EINTR) return std::nullopt;
  }
  auto peer = of(std::move(connection));
  if (!peer) errno = EPERM;
  return peer;
}

bool Peer::send(std::span<const std::byte> bytes, const std::vector<int>& descriptors) const {
  NORIA_INVARIANT(descriptors.size() <= kMostDescriptors, "too many descriptors in one packet");
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMostDescriptors * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    const std::size_t size = descriptors.size() * sizeof(int);
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(size);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(size);
    std::memcpy(CMSG_DATA(header), descriptors.data(), size);
  }
  while (sendmsg(connection_.number(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    if (errno == EPIPE || errno == ECONNRESET) return false;
    if (errno != EINTR) refuse_to_share("sendmsg of " + std::to_string(bytes.size()) + " bytes");
  }
  return true;
}

std::optional<Packet> Peer::hear(std::span<std::byte> bytes) const {
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMostDescriptors * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t size = 0;
  while ((size = recvmsg(connection_.number(), &message, MSG_DONTWAIT | MSG_TRUNC | MSG_CMSG_CLOEXEC)) < 0) {
    if (errno == EAGAIN) return std::nullopt;
    if (errno == ECONNRESET) return Packet{0, {}};
    if (errno != EINTR) refuse_to_share("recvmsg");
  }
  Packet packet{static_cast<std::size_t>(size), {}};
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; CMSG_LEN(at + sizeof(int)) <= header->cmsg_len; at += sizeof(int)) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(header) + at, sizeof number);
      packet.descriptors.emplace_back(number);
    }
  }
  return packet;
}

bool Peer::ended() const {
  if (has_ended_) return true;
  // poll reports the hangup of a connection even if no event is requested.
  pollfd watched{process_ ? process_.number() : connection_.number(), static_cast<short>(process_ ? POLLIN : 0), 0};
  int ready = 0;
  while ((ready = poll(&watched, 1, 0)) < 0) {
    if (errno != EINTR) refuse_to_share("poll");
  }
  return ready > 0;
}

std::vector<pollfd> Peer::watched() const {
  return {{connection_.number(), POLLIN, 0}, {process_.number(), POLLIN, 0}};
}

}  // namespace noria
