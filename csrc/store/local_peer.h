// Another process of this machine at the other end of a connection: packets, descriptors with them, and whether it
// still runs.
//
// Ownership: a Peer owns its descriptors, all of them closed on exec. Sockets have random names and no file: the last
//   process that holds one takes the name with it. Such names are of a network namespace: containers that share none
//   do not meet.
// Order: packets of one connection arrive whole and in the order of sending. Threads: the caller serialises. No member
//   blocks but `wait` and `Peer::connect`; signals end neither.
//
// Note [Who has ended]. A connection's end of file tells that the other process is no more. But a forked child (a
// worker of a DataLoader) holds a copy of the connection, and keeps it open for as long as it lives. So it is a pidfd
// of the other process that is asked: it becomes readable when that process ends, whoever holds its descriptors, and
// not before its memory and what it had opened of drivers are gone, which a closed connection does not tell. It needs
// the other's pid, which the connection knows. Where that is of a foreign pid namespace, or a sandbox refuses pidfds,
// the connection alone must do, and an end is known only when the children have ended too.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <poll.h>

namespace noria {

class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  Descriptor(const Descriptor&) = delete;  // one owner
  Descriptor& operator=(const Descriptor&) = delete;

  explicit operator bool() const { return number_ >= 0; }
  int number() const { return number_; }
  int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout);
  int left_ms() const;  // 0: passed

 private:
  std::chrono::steady_clock::time_point end_;
};

/// Until something has happened, or the deadline.
void wait(std::vector<pollfd> watched, const Deadline& deadline);

/// Throws MachineError with errno's text.
[[noreturn]] void refuse_to_share(const std::string& call);

/// 32 letters, and enough of them to be nobody else's.
std::string random_name();
/// Takes connections to `name`.
Descriptor listen_as(const std::string& name);

struct Packet {
  std::size_t size;  // as sent: more than what was made room for is cut off
  std::vector<Descriptor> descriptors;
};

class Peer {
 public:
  /// The next one that waits at a listener; none: nobody does. One of another user is dropped.
  static std::optional<Peer> accept(const Descriptor& listener);
  /// Does not wait to be accepted, but for a place in the queue. None: nobody listens, see errno.
  static std::optional<Peer> connect(const std::string& name, std::chrono::milliseconds timeout);

  /// False: the other end is closed.
  bool send(std::span<const std::byte> bytes, const std::vector<int>& descriptors = {}) const;
  /// None: nothing has come. An empty packet: the other end is closed.
  std::optional<Packet> hear(std::span<std::byte> bytes) const;
  /// The process has ended, see the Note; what it has sent can still be heard.
  bool ended() const;
  /// What becomes ready when there is something to hear, or the process ends.
  std::vector<pollfd> watched() const;

 private:
  Peer(Descriptor connection, int pid);
  static std::optional<Peer> of(Descriptor connection);  // none: of another user

  Descriptor connection_;
  Descriptor process_;  // a pidfd; none: see the Note
  bool has_ended_;      // known from the start
};

}  // namespace noria
